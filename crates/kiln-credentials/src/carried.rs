//! Credentials of images that another is made from: their manifests go along into the new store.

use std::collections::BTreeMap;

use ring::digest::{SHA256, digest};

use crate::cbor::Value;
use crate::jumbf::{Superbox, hashed};

/// Maximum bytes of all manifests that one file carries over.
const MAX_ALL: usize = 8 << 20;
/// Maximum bytes of those of one image.
const MAX_ONE: usize = 4 << 20;
/// Maximum manifests of one image.
const MAX_MANIFESTS: usize = 64;
/// A manifest, and one that updates another.
const KINDS: [[u8; 4]; 2] = [*b"c2ma", *b"c2um"];

/// The credentials of an image, and what checking them has shown. See [`carry`](crate::carry).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Label and box, that of the image last.
    manifests: Vec<(String, Vec<u8>)>,
    manifest_hash: Vec<u8>,
    signature_hash: Vec<u8>,
    results: Results,
}

/// What a check has shown: code, address and explanation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Results {
    pub success: Vec<[String; 3]>,
    pub informational: Vec<[String; 3]>,
    pub failure: Vec<[String; 3]>,
}

impl Carried {
    /// Takes a store apart. `None` if it is not of the form that can be copied: compressed, damaged, or too large.
    pub(crate) fn new(store: &[u8], results: Results) -> Option<Carried> {
        let whole = Superbox::read(store).filter(|whole| whole.whole.len() == store.len())?;
        let manifests: Vec<Superbox<'_>> = whole.children().take(MAX_MANIFESTS + 1).collect();
        let length: usize = manifests.iter().map(|manifest| manifest.whole.len()).sum();
        let is_plain = |manifest: &Superbox<'_>| manifest.kind().is_some_and(|kind| KINDS.contains(&kind));
        let is_whole = length == whole.content_length() && manifests.iter().all(is_plain);
        if !is_whole || length > MAX_ONE || manifests.len() > MAX_MANIFESTS {
            return None;
        }
        let active = manifests.last()?;
        let signature = active.children().find(|part| part.label == "c2pa.signature")?;
        let hash = |superbox: &[u8]| digest(&SHA256, hashed(superbox)).as_ref().to_vec();
        Some(Carried {
            manifest_hash: hash(active.whole),
            signature_hash: hash(signature.whole),
            results,
            manifests: manifests.iter().map(|own| (own.label.to_owned(), own.whole.to_vec())).collect(),
        })
    }

    pub(crate) fn label(&self) -> &str {
        self.manifests.last().map_or("", |(label, _)| label)
    }

    /// The hash of its manifest.
    pub(crate) fn manifest_hash(&self) -> &[u8] {
        &self.manifest_hash
    }

    /// The address of the image's manifest with its hash.
    pub(crate) fn manifest_link(&self) -> Value {
        link(format!("self#jumbf=/c2pa/{}", self.label()), &self.manifest_hash)
    }

    /// The address of its signature with its hash.
    pub(crate) fn signature_link(&self) -> Value {
        link(format!("self#jumbf=/c2pa/{}/c2pa.signature", self.label()), &self.signature_hash)
    }

    /// What checking it has shown.
    pub(crate) fn results(&self) -> Value {
        let list = |all: &[[String; 3]]| {
            let status = |[code, address, explanation]: &[String; 3]| {
                Value::object([
                    ("code", Some(Value::text(code))),
                    ("url", Some(address).filter(|address| !address.is_empty()).map(Value::text)),
                    ("explanation", Some(Value::text(explanation))),
                ])
            };
            Some(Value::Array(all.iter().map(status).collect()))
        };
        let active = Value::object([
            ("success", list(&self.results.success)),
            ("informational", list(&self.results.informational)),
            ("failure", list(&self.results.failure)),
        ]);
        Value::object([("activeManifest", Some(active))])
    }
}

fn link(address: String, hash: &[u8]) -> Value {
    Value::object([("url", Some(Value::Text(address))), ("hash", Some(Value::Bytes(hash.to_vec())))])
}

/// Which images' credentials are carried over, and all their manifests, each once. Those that don't fit, or have the label of
/// other ones, are not.
pub(crate) fn selected<'a>(all: &[Option<&'a Carried>]) -> (Vec<Option<&'a Carried>>, Vec<Vec<u8>>) {
    let mut known: BTreeMap<&str, &[u8]> = BTreeMap::new();
    let (mut manifests, mut length) = (Vec::new(), 0);
    let mut fits = |carried: &&'a Carried| {
        let is_new = |label: &str| !known.contains_key(label);
        let new = carried.manifests.iter().filter(|(label, _)| is_new(label));
        let more: usize = new.map(|(_, manifest)| manifest.len()).sum();
        let mut all = carried.manifests.iter();
        let clashes = all.any(|(label, own)| known.get(&label[..]).is_some_and(|other| other != own));
        if clashes || length + more > MAX_ALL {
            return false;
        }
        length += more;
        for (label, manifest) in &carried.manifests {
            if known.insert(label, manifest).is_none() {
                manifests.push(manifest.clone());
            }
        }
        true
    };
    let selected = all.iter().map(|carried| carried.filter(&mut fits)).collect();
    (selected, manifests)
}

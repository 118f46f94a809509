//! Credentials of images that another is made from: their manifests go along into the new store.

use std::collections::BTreeMap;

use crate::cbor::Value;

/// Maximum bytes of all manifests that one file carries over.
const MAX_ALL: usize = 8 << 20;

/// The credentials of an image, and what checking them has shown. See [`carry`](crate::carry).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Label and box, that of the image last.
    pub(crate) manifests: Vec<(String, Vec<u8>)>,
    pub(crate) manifest_hash: Vec<u8>,
    pub(crate) signature_hash: Vec<u8>,
    /// Successes, remarks and failures: code, address and explanation of each.
    pub(crate) results: [Vec<[String; 3]>; 3],
}

impl Carried {
    /// The label of the image's manifest.
    pub(crate) fn label(&self) -> &str {
        self.manifests.last().map_or("", |(label, _)| label)
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
        let [success, informational, failure] = &self.results;
        let active = Value::object([
            ("success", list(success)),
            ("informational", list(informational)),
            ("failure", list(failure)),
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

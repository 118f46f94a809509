//! Carrying the credentials of an input image over, with what checking them has shown.

use encypher_c2pa::{ValidationResults, VerificationStatus, local_evidence_with_options};
use ring::digest::{SHA256, digest};

use super::text::text;
use super::{MAX_FILE, excess, limited, media_type, options, store};
use crate::jumbf::{Superbox, hashed};
use crate::{Carried, Trust};

/// Maximum bytes of the manifests of one image.
const MAX_LENGTH: usize = 4 << 20;
/// Maximum number of them.
const MAX_MANIFESTS: usize = 64;
/// Maximum entries of each list of results: a manifest has some for every part.
const MAX_RESULTS: usize = 64;
/// A manifest, and one that updates another.
const KINDS: [&[u8]; 2] = [b"c2ma", b"c2um"];
/// Where a superbox has its kind: behind its own header and that of its description.
const KIND: std::ops::Range<usize> = 16..20;

/// The credentials of an image file, for the store of one that is made from it; `None` if it has none that can be carried over:
/// they are compressed, damaged or too large.
///
/// What is wrong with them goes along. Trusted are the authorities on C2PA's list alone: the result is read elsewhere.
pub fn carry<F: AsRef<[u8]> + Send + 'static>(file: F) -> Option<Carried> {
    limited(file, checked).ok().flatten()
}

fn checked(file: &[u8]) -> Option<Carried> {
    let media_type = media_type(file).filter(|_| file.len() <= MAX_FILE)?;
    let options = options(&Trust::default());
    excess(&store(file, media_type, &options)?).is_none().then_some(())?;
    let found = local_evidence_with_options(file, media_type, &options).ok()?;
    let carried = carried(found.manifest_store.as_deref()?, &found.report.validation_results)?;
    // The same box, read in two ways.
    let digest = found.store_manifests.last()?;
    let is_same = digest.sha256 == kiln_base::hex(&carried.manifest_hash) && digest.label == carried.label();
    is_same.then_some(carried)
}

/// Takes a store apart.
fn carried(store: &[u8], results: &ValidationResults) -> Option<Carried> {
    let whole = Superbox::read(store).filter(|whole| whole.whole.len() == store.len())?;
    let manifests: Vec<Superbox<'_>> = whole.children().take(MAX_MANIFESTS + 1).collect();
    let length: usize = manifests.iter().map(|manifest| manifest.whole.len()).sum();
    let is_plain =
        |manifest: &Superbox<'_>| manifest.whole.get(KIND).is_some_and(|kind| KINDS.contains(&kind));
    // Nothing is between its description and them, or behind them.
    let description = u32::from_be_bytes(*store.get(8..)?.first_chunk()?) as usize;
    let is_whole = 8 + description + length == store.len();
    let fits = length <= MAX_LENGTH && manifests.len() <= MAX_MANIFESTS;
    if !is_whole || !fits || !manifests.iter().all(is_plain) {
        return None;
    }
    let active = manifests.last()?;
    let signature = active.children().find(|part| part.label == "c2pa.signature")?;
    let hash = |superbox: &[u8]| digest(&SHA256, hashed(superbox)).as_ref().to_vec();
    Some(Carried {
        manifest_hash: hash(active.whole),
        signature_hash: hash(signature.whole),
        results: [&results.success, &results.informational, &results.failure].map(|all| list(all)),
        manifests: manifests.iter().map(|own| (own.label.to_owned(), own.whole.to_vec())).collect(),
    })
}

fn list(all: &[VerificationStatus]) -> Vec<[String; 3]> {
    let standard = all.iter().filter(|status| !status.code.starts_with("com."));
    let texts =
        |status: &VerificationStatus| [&status.code, &status.url, &status.explanation].map(|part| text(part));
    standard.take(MAX_RESULTS).map(texts).collect()
}

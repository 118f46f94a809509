//! Carrying the credentials of an input image over, with what checking them has shown.

use encypher_c2pa::{ValidationResults, VerificationStatus, local_evidence_with_options};

use super::text::text;
use super::{MAX_FILE, excess, limited, media_type, options, store};
use crate::Trust;
use crate::carried::{Carried, Results};

/// Maximum entries of each list of results: a manifest has some for every part.
const MAX_RESULTS: usize = 64;

/// The credentials of an image file, for the store of one that is made from it; `None` if it has none that can be carried over.
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
    let carried = Carried::new(found.manifest_store.as_deref()?, results(&found.report.validation_results))?;
    // The same box, read in two ways.
    let digest = found.store_manifests.last()?;
    let is_same = digest.sha256 == kiln_base::hex(carried.manifest_hash()) && digest.label == carried.label();
    is_same.then_some(carried)
}

fn results(all: &ValidationResults) -> Results {
    let list = |all: &[VerificationStatus]| {
        let standard = all.iter().filter(|status| !status.code.starts_with("com."));
        let texts = |status: &VerificationStatus| {
            [&status.code, &status.url, &status.explanation].map(|part| text(part))
        };
        standard.take(MAX_RESULTS).map(texts).collect()
    };
    Results {
        success: list(&all.success),
        informational: list(&all.informational),
        failure: list(&all.failure),
    }
}

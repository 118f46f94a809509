//! A program that checks no credentials.

use kiln_image::read_manifest_store;

use crate::manifest::is_store;
use crate::{Carried, Report, State, Trust};

/// Whether this program checks credentials.
pub const CAN_VERIFY: bool = false;

/// Says whether a file has credentials; nothing is checked.
pub fn verify<F: AsRef<[u8]> + Send + 'static>(file: F, _: &Trust) -> Report {
    match read_manifest_store(file.as_ref()) {
        Ok(Some(store)) if is_store(&store) => {
            Report::not_checked("kiln.notBuilt", "this program was built without `verify`")
        }
        _ => Report::of(State::None),
    }
}

/// Carries nothing over: credentials that were not checked may be anybody's.
pub fn carry<F: AsRef<[u8]> + Send + 'static>(_: F) -> Option<Carried> {
    None
}

//! Where image files come from.

use std::ffi::c_char;
use std::path::PathBuf;

use kiln_catalog::{FileOrigin, trust_with};

use crate::abi;
use crate::images::KilnBuffer;
use crate::status::{Failure, KilnStatus, guard};

/// Says where an image file comes from, as JSON with the keys of `kiln verify --json`: signed credentials (C2PA), AI mark and
/// watermark. `state` is "trusted", "valid" (of a signer that is not known here), "invalid", "none", or "not_checked" in
/// libraries that were built without the feature `verify`.
///
/// `path`: the file. `trust`: a file of root certificates (PEM) to trust besides those of C2PA's list and one's own; NULL: none.
/// Free `json` with kiln_buffer_free; after an error there are no bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_verify(
    path: *const c_char,
    trust: *const c_char,
    json: *mut KilnBuffer,
) -> KilnStatus {
    guard(|| {
        if json.is_null() {
            return Err(Failure::invalid("the kiln_buffer is NULL"));
        }
        // SAFETY: not NULL, and the caller's to write.
        unsafe { *json = KilnBuffer::NONE };
        // SAFETY: arguments as the header says.
        let (path, trust) = unsafe { (abi::name(path, "path")?, abi::name(trust, "trust")?) };
        let path = PathBuf::from(path.ok_or_else(|| Failure::invalid("the path is NULL or empty"))?);
        let roots: Vec<PathBuf> = trust.into_iter().map(PathBuf::from).collect();
        let origin = FileOrigin::of_file(&path, &trust_with(&roots)?)?;
        // SAFETY: as above.
        unsafe { *json = serde_json::json!(origin).to_string().into_bytes().into() };
        Ok(())
    })
}

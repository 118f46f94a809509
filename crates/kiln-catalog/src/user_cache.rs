//! The cache folder, for data that can be computed again.

use std::path::PathBuf;

use kiln_base::folders;
use kiln_engine::TextCache;

use crate::error::{Error, Result};

const FOLDER: &str = "KILN_CACHE_DIR";
const LIMIT: &str = "KILN_CACHE_MB";

/// Returns the cache folder: `KILN_CACHE_DIR`, or `kiln` in the user's cache folder.
pub fn folder() -> Option<PathBuf> {
    folders::kiln_cache()
}

/// Returns the cache of encoded texts. `KILN_CACHE_MB` limits its size.
pub fn texts() -> Result<Option<TextCache>> {
    let Some(folder) = folder() else { return Ok(None) };
    if folder.exists() && !folder.is_dir() && folders::from_env(FOLDER).is_some() {
        let what = format!("{FOLDER} is `{}`, which is not a folder", folder.display());
        return Err(Error::usage(what, "set the variable to a folder, or unset it"));
    }
    let cache = TextCache::new(folder.join("text"));
    Ok(Some(match limit()? {
        Some(mib) => cache.with_limit(mib.saturating_mul(1 << 20)),
        None => cache,
    }))
}

/// Returns the limit of the cache in MiB, if there is one.
fn limit() -> Result<Option<u64>> {
    let Some(text) = std::env::var_os(LIMIT).filter(|text| !text.is_empty()) else { return Ok(None) };
    let text = text.to_string_lossy();
    match text.trim().parse() {
        Ok(mib) => Ok(Some(mib)),
        Err(_) => {
            let what = format!("{LIMIT} is `{text}`, expected a number of MiB such as 512");
            Err(Error::usage(what, "correct the variable, or unset it"))
        }
    }
}

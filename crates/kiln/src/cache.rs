//! The cache folder, for data that can be computed again.

use std::path::PathBuf;

use kiln_base::folders;
use kiln_engine::TextCache;

/// Returns the cache folder: `KILN_CACHE_DIR`, or `kiln` in the user's cache folder.
pub fn folder() -> Option<PathBuf> {
    folders::from_env("KILN_CACHE_DIR").or_else(|| Some(folders::cache()?.join("kiln")))
}

/// Returns the cache of encoded texts. `KILN_CACHE_MB` limits its size.
pub fn texts() -> Option<TextCache> {
    let cache = TextCache::new(folder()?.join("text"));
    let limit = std::env::var("KILN_CACHE_MB").ok().and_then(|text| text.trim().parse::<u64>().ok());
    Some(match limit {
        Some(mib) => cache.with_limit(mib.saturating_mul(1 << 20)),
        None => cache,
    })
}

//! Where things are kept that can be made again.

use std::path::PathBuf;

use kiln_engine::TextCache;

/// The folder: `KILN_CACHE_DIR`, or `kiln` where programs of this system keep such things.
pub fn folder() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(folder) = var("KILN_CACHE_DIR") {
        return Some(folder);
    }
    let base = match std::env::consts::OS {
        "windows" => var("LOCALAPPDATA"),
        "macos" => var("HOME").map(|home| home.join("Library/Caches")),
        // A relative path is to be ignored, says the specification.
        _ => var("XDG_CACHE_HOME").filter(|p| p.is_absolute()).or_else(|| Some(var("HOME")?.join(".cache"))),
    };
    base.map(|base| base.join("kiln"))
}

/// The cache of encoded texts; `KILN_CACHE_MB` says how large it may grow.
pub fn texts() -> Option<TextCache> {
    let cache = TextCache::new(folder()?.join("text"));
    let limit = std::env::var("KILN_CACHE_MB").ok().and_then(|text| text.trim().parse::<u64>().ok());
    Some(match limit {
        Some(mib) => cache.with_limit(mib.saturating_mul(1 << 20)),
        None => cache,
    })
}

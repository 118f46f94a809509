//! The disk cache: compiled kernels and the fastest cuBLASLt algorithms.
//!
//! A key covers everything that determines the content, so a changed kernel or another GPU is a miss.
//! Entries are written atomically; concurrent writers of one entry write the same content. Entries with a wrong checksum
//! are misses.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use kiln_base::{AtomicFile, hex};
use sha2::{Digest, Sha256};

const MAGIC: &[u8] = b"kiln cuda 1\n";

/// A folder of cached entries; without a folder every lookup misses.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskCache {
    folder: Option<PathBuf>,
}

/// Name of an entry: a hash of everything that determines its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheKey(String);

impl CacheKey {
    /// Hashes `parts`. `stem` only makes the file name readable.
    pub fn new(stem: &str, parts: &[&[u8]]) -> CacheKey {
        let mut hash = Sha256::new();
        for part in parts {
            // Lengths keep ("ab", "c") apart from ("a", "bc").
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        CacheKey(format!("{stem}-{}", hex(&hash.finalize()[..12])))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl DiskCache {
    /// A cache in `folder`, which is created by the first write.
    pub fn new(folder: Option<PathBuf>) -> DiskCache {
        DiskCache { folder }
    }

    /// In Kiln's cache folder.
    pub fn default_folder() -> Option<PathBuf> {
        Some(kiln_base::folders::kiln_cache()?.join("cuda"))
    }

    fn path(&self, key: &CacheKey) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(&key.0))
    }

    /// Returns an entry whose checksum matches.
    pub fn get(&self, key: &CacheKey) -> Option<Vec<u8>> {
        let bytes = fs::read(self.path(key)?).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (sum, content) = rest.split_at_checked(32)?;
        (Sha256::digest(content).as_slice() == sum).then(|| content.to_vec())
    }

    /// Whether there is such an entry, perhaps a damaged one.
    pub fn contains(&self, key: &CacheKey) -> bool {
        self.path(key).is_some_and(|path| path.is_file())
    }

    /// Stores an entry. Failures are ignored: they only cost time at the next start.
    pub fn put(&self, key: &CacheKey, content: &[u8]) {
        if let Some(path) = self.path(key) {
            let _ = write(&path, content);
        }
    }

    /// Returns the entry, or creates and stores it.
    pub fn get_or_create<E>(
        &self,
        key: &CacheKey,
        make: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        if let Some(content) = self.get(key) {
            return Ok(content);
        }
        let content = make()?;
        self.put(key, &content);
        Ok(content)
    }
}

fn write(path: &Path, content: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    let mut file = AtomicFile::create(path)?;
    file.file().write_all(MAGIC)?;
    file.file().write_all(&Sha256::digest(content))?;
    file.file().write_all(content)?;
    // The checksum detects files damaged by a power failure.
    file.commit_unsynced()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, DiskCache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::new(Some(folder.path().join("not/yet/there")));
        (folder, cache)
    }

    fn made(cache: &DiskCache, key: &CacheKey, content: &str) -> (Vec<u8>, bool) {
        let mut called = false;
        let make = || {
            called = true;
            Ok::<_, ()>(content.as_bytes().to_vec())
        };
        (cache.get_or_create(key, make).unwrap(), called)
    }

    #[test]
    fn an_entry_is_created_once() {
        let (_folder, cache) = cache();
        let key = CacheKey::new("norm", &[b"source", b"sm_90a", b"13.0"]);
        assert_eq!(made(&cache, &key, "cubin"), (b"cubin".to_vec(), true));
        assert_eq!(made(&cache, &key, "another"), (b"cubin".to_vec(), false));
    }

    #[test]
    fn every_part_changes_the_key() {
        let key = |parts: &[&[u8]]| CacheKey::new("norm", parts);
        let base = key(&[b"source", b"sm_90a", b"13.0"]);
        for other in [
            key(&[b"source2", b"sm_90a", b"13.0"]),
            key(&[b"source", b"sm_80", b"13.0"]),
            key(&[b"source", b"sm_90a", b"12.9"]),
            key(&[b"sources", b"m_90a", b"13.0"]),
            key(&[b"source", b"sm_90a13.0"]),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_damaged_entry_is_created_again() {
        let (_folder, cache) = cache();
        let key = CacheKey::new("norm", &[b"x"]);
        made(&cache, &key, "a fairly long content");
        let path = cache.path(&key).unwrap();
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        let cut = whole[..whole.len() - 3].to_vec();
        for damage in [flipped, cut, whole[..20].to_vec(), Vec::new(), b"something else".to_vec()] {
            fs::write(&path, damage).unwrap();
            assert_eq!(made(&cache, &key, "remade it"), (b"remade it".to_vec(), true));
            assert_eq!(fs::read(&path).unwrap().len(), MAGIC.len() + 32 + 9);
        }
    }

    #[test]
    fn concurrent_writers_leave_one_whole_entry_and_no_temporary_files() {
        let (_folder, cache) = cache();
        let key = CacheKey::new("norm", &[b"x"]);
        let content = "x".repeat(100_000);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    cache.put(&key, content.as_bytes());
                    assert_eq!(cache.get(&key).unwrap(), content.as_bytes());
                });
            }
        });
        assert_eq!(fs::read_dir(cache.folder.unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_cache_that_cannot_be_written_always_misses() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "in the way").unwrap();
        let key = CacheKey::new("norm", &[b"x"]);
        for cache in [DiskCache::default(), DiskCache::new(Some(file.join("below")))] {
            assert_eq!(made(&cache, &key, "content"), (b"content".to_vec(), true));
            assert_eq!(cache.get(&key), None);
        }
    }
}

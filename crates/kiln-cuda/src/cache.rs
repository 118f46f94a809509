//! What is made once and kept on disk: compiled kernels, and which way of multiplying was fastest.
//!
//! An entry is found by everything that decides its content, so a changed kernel, another GPU or another compiler simply
//! finds nothing. Entries are written beside their place and renamed; of two processes that make the same one, the last
//! wins, and both have written the same. An entry that does not have the checksum it was written with is made anew.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

const MAGIC: &[u8] = b"kiln cuda 1\n";

/// A folder of entries; without one, nothing is kept.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

/// Names an entry by what decides its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key(String);

impl Key {
    /// `stem` is for people who look into the folder; `parts` are what counts.
    pub fn new(stem: &str, parts: &[&[u8]]) -> Key {
        let mut hash = Sha256::new();
        for part in parts {
            // Lengths keep ("ab", "c") apart from ("a", "bc").
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Key(format!("{stem}-{}", hex(&hash.finalize()[..12])))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

impl Cache {
    /// Entries in `folder`, which is made when something is to be kept.
    pub fn at(folder: Option<PathBuf>) -> Cache {
        Cache { folder }
    }

    /// Where this system keeps what programs can make again.
    pub fn usual_folder() -> Option<PathBuf> {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = match std::env::consts::OS {
            "windows" => var("LOCALAPPDATA"),
            "macos" => var("HOME").map(|home| home.join("Library/Caches")),
            _ => var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache"))),
        };
        base.map(|base| base.join("kiln").join("cuda"))
    }

    fn path(&self, key: &Key) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(&key.0))
    }

    /// An entry, whole and as it was written.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        let bytes = fs::read(self.path(key)?).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (sum, content) = rest.split_at_checked(32)?;
        (Sha256::digest(content).as_slice() == sum).then(|| content.to_vec())
    }

    /// Keeps an entry. A disk that is full or may not be written to costs time at the next start and nothing else.
    pub fn put(&self, key: &Key, content: &[u8]) {
        if let Some(path) = self.path(key) {
            let _ = write(&path, content);
        }
    }

    /// The entry, made by `make` when there is none.
    pub fn get_or_make<E>(&self, key: &Key, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        if let Some(content) = self.get(key) {
            return Ok(content);
        }
        let content = make()?;
        self.put(key, &content);
        Ok(content)
    }
}

fn write(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(MAGIC)?;
    file.write_all(&Sha256::digest(content))?;
    file.write_all(content)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(folder.path().join("not/yet/there")));
        (folder, cache)
    }

    fn made(cache: &Cache, key: &Key, content: &str) -> (Vec<u8>, bool) {
        let mut called = false;
        let make = || {
            called = true;
            Ok::<_, ()>(content.as_bytes().to_vec())
        };
        (cache.get_or_make(key, make).unwrap(), called)
    }

    #[test]
    fn an_entry_is_made_once() {
        let (_folder, cache) = cache();
        let key = Key::new("norm", &[b"source", b"sm_90a", b"13.0"]);
        assert_eq!(made(&cache, &key, "cubin"), (b"cubin".to_vec(), true));
        assert_eq!(made(&cache, &key, "another"), (b"cubin".to_vec(), false));
    }

    #[test]
    fn everything_that_decides_the_content_decides_the_key() {
        let key = |parts: &[&[u8]]| Key::new("norm", parts);
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
    fn a_damaged_entry_is_made_anew() {
        let (_folder, cache) = cache();
        let key = Key::new("norm", &[b"x"]);
        made(&cache, &key, "a fairly long content");
        let path = cache.path(&key).unwrap();
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        let cut = whole[..whole.len() - 3].to_vec();
        for damage in [flipped, cut, whole[..20].to_vec(), Vec::new(), b"something else".to_vec()] {
            fs::write(&path, damage).unwrap();
            assert_eq!(made(&cache, &key, "made anew"), (b"made anew".to_vec(), true));
            assert_eq!(fs::read(&path).unwrap().len(), MAGIC.len() + 32 + 9);
        }
    }

    #[test]
    fn many_writers_of_one_entry_leave_a_whole_one_and_nothing_else() {
        let (_folder, cache) = cache();
        let key = Key::new("norm", &[b"x"]);
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
    fn without_a_place_to_write_everything_still_works() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "in the way").unwrap();
        let key = Key::new("norm", &[b"x"]);
        for cache in [Cache::default(), Cache::at(Some(file.join("below")))] {
            assert_eq!(made(&cache, &key, "content"), (b"content".to_vec(), true));
            assert_eq!(cache.get(&key), None);
        }
    }
}

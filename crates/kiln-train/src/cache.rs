//! A folder of encoded images and texts.
//!
//! An entry's name is a hash of everything its values depend on: the image's bytes, its size and all of the autoencoder, or
//! the caption's tokens and all of the text encoder, the arithmetic and the program. So an entry is never stale. Entries are written whole or not at all and
//! carry a hash of their values: a training that was killed continues with those that are there.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use kiln_base::hex;
use kiln_tensor::HostTensor;
use kiln_weights::{WeightSource, save};
use sha2::{Digest, Sha256};

use crate::{Error, Result};

const TENSOR: &str = "values";
const HASH: &str = "sha256";
const GRID: &str = "grid";

/// Bytes of entries that are kept in memory.
const MEMORY: usize = 2 << 30;

/// An encoded image or text.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// Tokens: `[rows, dim]`.
    pub values: HostTensor,
    /// Height and width in tokens; a text has one row.
    pub grid: [usize; 2],
}

/// Identifies an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(String);

impl Key {
    /// Creates the key of what these fields determine.
    pub fn new(fields: &[&str]) -> Key {
        let mut hash = Sha256::new();
        hash.update(b"kiln train 2\n");
        for field in fields {
            hash.update((field.len() as u64).to_le_bytes());
            hash.update(field);
        }
        Key(hex(hash.finalize()))
    }
}

/// The cache in a folder, with the entries that were used already in memory.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
    memory: HashMap<Key, Encoded>,
    bytes: usize,
}

impl Cache {
    /// Opens a cache. The folder is created with the first entry.
    pub fn new(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: folder.into(), memory: HashMap::new(), bytes: 0 }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether there is an entry. It may still be damaged.
    pub fn contains(&self, key: &Key) -> bool {
        self.memory.contains_key(key) || self.path(key).is_file()
    }

    /// Returns an entry if it is there and undamaged.
    pub fn get(&mut self, key: &Key) -> Option<Encoded> {
        if let Some(encoded) = self.memory.get(key) {
            return Some(encoded.clone());
        }
        let encoded = read(&self.path(key))?;
        self.keep(key, &encoded);
        Some(encoded)
    }

    /// Stores an entry.
    pub fn put(&mut self, key: &Key, encoded: Encoded) -> Result<()> {
        let path = self.path(key);
        let folder = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let [height, width] = encoded.grid;
        let metadata = BTreeMap::from([
            (HASH.to_owned(), hash(&encoded.values)),
            (GRID.to_owned(), format!("{height}x{width}")),
        ]);
        save::save(&path, &[(TENSOR, encoded.values.clone())], &metadata)?;
        self.keep(key, &encoded);
        Ok(())
    }

    /// Returns the size of an image that was decoded before, by the hash of its bytes.
    pub fn known_size(&self, hash: &str) -> Option<[u32; 2]> {
        let text = fs::read_to_string(self.size_path(hash)).ok()?;
        let (width, height) = text.split_once('x')?;
        Some([width.parse().ok()?, height.parse().ok()?])
    }

    /// Remembers that an image is whole, and its size.
    pub fn remember_size(&self, hash: &str, [width, height]: [u32; 2]) -> Result<()> {
        let path = self.size_path(hash);
        if path.is_file() {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        kiln_base::write_atomic(&path, format!("{width}x{height}").as_bytes())
            .map_err(Error::io("write", &path))
    }

    fn size_path(&self, hash: &str) -> PathBuf {
        self.folder.join("sizes").join(hash)
    }

    fn keep(&mut self, key: &Key, encoded: &Encoded) {
        let bytes = encoded.values.bytes().len();
        if self.bytes + bytes <= MEMORY {
            self.bytes += bytes;
            self.memory.insert(key.clone(), encoded.clone());
        }
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(&key.0[..2]).join(format!("{}.safetensors", key.0))
    }
}

fn read(path: &Path) -> Option<Encoded> {
    let source = WeightSource::from_bytes(path, fs::read(path).ok()?).ok()?;
    let values = source.tensor(TENSOR).ok()?;
    let (height, width) = source.metadata().get(GRID)?.split_once('x')?;
    let grid = [height.parse().ok()?, width.parse().ok()?];
    let rows = values.shape().dims().first().copied();
    let whole = source.metadata().get(HASH) == Some(&hash(&values)) && rows == Some(grid[0] * grid[1]);
    whole.then_some(Encoded { values, grid })
}

fn hash(values: &HostTensor) -> String {
    hex(Sha256::digest(values.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(value: f32) -> Encoded {
        Encoded { values: HostTensor::from_f32([6, 2], vec![value; 12]).unwrap(), grid: [2, 3] }
    }

    #[test]
    fn entries_survive_the_process_and_damage_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let (key, other) = (Key::new(&["a", "b"]), Key::new(&["ab", ""]));
        let mut cache = Cache::new(folder.path().join("cache"));
        assert!(!cache.contains(&key) && cache.get(&key).is_none());
        cache.put(&key, encoded(1.0)).unwrap();
        assert_eq!(cache.get(&key), Some(encoded(1.0)));
        let mut again = Cache::new(cache.folder());
        assert!(again.contains(&key) && !again.contains(&other));
        assert_eq!(again.get(&key), Some(encoded(1.0)));
        let path = cache.path(&key);
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(Cache::new(cache.folder()).get(&key), None);
        fs::write(&path, &bytes[..40]).unwrap();
        assert_eq!(Cache::new(cache.folder()).get(&key), None);
    }

    #[test]
    fn a_folder_that_can_not_be_created_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = Cache::new(file.path()).put(&Key::new(&["a"]), encoded(1.0)).unwrap_err().to_string();
        assert!(message.contains(&file.path().display().to_string()), "{message}");
    }
}

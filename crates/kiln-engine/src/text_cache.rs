//! A disk cache of encoded texts.
//!
//! An entry is a safetensors file whose name is a hash of everything its values depend on: the text encoder's configuration
//! and every byte of its weights, the token ids, the arithmetic, and the program itself, since another build may round
//! differently. So an entry is never stale, and using it changes no bit of the result. Entries are written atomically,
//! carry a hash of their values and are never modified, so several programs may share a folder. The least recently used
//! entries are evicted.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kiln_base::{hex, program_identity};
use kiln_nn::tokenizer::Tokens;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{WeightSource, save};
use sha2::{Digest, Sha256};

use crate::content_hashes::ContentHashes;

/// Default size limit in bytes.
const DEFAULT_LIMIT: u64 = 256 << 20;
const PREFIX: &str = "text-";
const SUFFIX: &str = ".safetensors";
const TENSOR: &str = "text";
const HASH: &str = "sha256";
/// Age at which temporary files of an interrupted write are removed: longer than any write takes.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A cache of encoded texts in a folder.
#[derive(Clone, Debug)]
pub struct TextCache {
    folder: PathBuf,
    limit: u64,
}

/// Identifies an encoded text.
pub(crate) struct Key {
    name: String,
    shape: [usize; 2],
    dtype: DType,
}

impl Key {
    /// Creates the key of `tokens`, encoded to these states, together `text_dim` wide, by the encoder with this
    /// [content key](crate::ModelComponent::content_key). `numerics` identifies the backend's arithmetic.
    pub fn new(
        encoder: &str,
        numerics: &str,
        dtype: DType,
        tokens: &Tokens,
        states: &[usize],
        text_dim: usize,
    ) -> Key {
        let mut hash = Sha256::new();
        hash.update(b"kiln text 3\n");
        for field in [encoder, numerics, dtype.name(), env!("CARGO_PKG_VERSION"), program_identity()] {
            hash.update((field.len() as u64).to_le_bytes());
            hash.update(field);
        }
        let numbers = [tokens.real.start, tokens.real.end, states.len()];
        numbers.iter().chain(states).for_each(|n| hash.update((*n as u64).to_le_bytes()));
        tokens.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        Key { name: hex(hash.finalize()), shape: [tokens.ids.len(), text_dim], dtype }
    }
}

impl TextCache {
    /// Creates a cache of at most 256 MiB in `folder`. The folder is created with the first entry.
    pub fn new(folder: impl Into<PathBuf>) -> TextCache {
        TextCache { folder: folder.into(), limit: DEFAULT_LIMIT }
    }

    /// Sets the size limit in bytes.
    pub fn with_limit(self, limit: u64) -> TextCache {
        TextCache { limit, ..self }
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the size limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the remembered hashes of weights, which keys are made of.
    pub(crate) fn hashes(&self) -> ContentHashes {
        ContentHashes::new(&self.folder)
    }

    /// Returns the number of entries and their total size in bytes.
    pub fn usage(&self) -> (usize, u64) {
        let entries = self.entries();
        (entries.len(), entries.iter().map(|e| e.bytes).sum())
    }

    /// Whether there is an entry. It may still be damaged.
    pub(crate) fn contains(&self, key: &Key) -> bool {
        self.path(key).is_file()
    }

    /// Returns a text if it is cached and undamaged.
    pub(crate) fn get(&self, key: &Key) -> Option<HostTensor> {
        let path = self.path(key);
        // Read instead of mapped: another program may remove the file meanwhile.
        let source = WeightSource::from_bytes(&path, fs::read(&path).ok()?).ok()?;
        let text = source.tensor(TENSOR).ok()?;
        let valid = text.shape().dims() == key.shape
            && text.dtype() == key.dtype
            && source.metadata().get(HASH) == Some(&hash(&text));
        if !valid {
            return None;
        }
        // The modification time is the time of last use. If setting it fails, the entry is evicted too early at worst.
        let _ =
            File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(text)
    }

    /// Stores a text, and evicts others if the cache is full. Does nothing if the text alone exceeds the limit.
    pub(crate) fn put(&self, key: &Key, text: &HostTensor) -> kiln_weights::Result<()> {
        let size = text.bytes().len() as u64;
        if size > self.limit {
            return Ok(());
        }
        let path = self.path(key);
        let failed = |source| kiln_weights::Error::Io { doing: "create", file: self.folder.clone(), source };
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let metadata = BTreeMap::from([(HASH.to_owned(), hash(text))]);
        save::save(&path, &[(TENSOR, text.clone())], &metadata)?;
        self.evict(&path);
        Ok(())
    }

    /// Removes the least recently used entries until the rest fits, except `newest`, and abandoned temporary files.
    /// Ignores errors: another program may remove the same file at the same time.
    fn evict(&self, newest: &Path) {
        let mut entries = self.entries();
        entries.sort_by_key(|entry| entry.used);
        let mut total: u64 = entries.iter().map(|e| e.bytes).sum();
        for entry in entries.iter().filter(|e| e.path != newest) {
            if total <= self.limit {
                break;
            }
            let _ = fs::remove_file(&entry.path);
            total -= entry.bytes;
        }
        for path in self.files().filter(|path| has_affixes(path, ".kiln-", ".tmp")) {
            let age = fs::metadata(&path).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
            if age.is_some_and(|age| age > ABANDONED) {
                let _ = fs::remove_file(path);
            }
        }
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{PREFIX}{}{SUFFIX}", key.name))
    }

    fn files(&self) -> impl Iterator<Item = PathBuf> {
        fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path())
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |path: PathBuf| {
            let metadata = fs::metadata(&path).ok()?;
            Some(Entry { bytes: metadata.len(), used: metadata.modified().ok()?, path })
        };
        self.files().filter(|path| has_affixes(path, PREFIX, SUFFIX)).filter_map(entry).collect()
    }
}

struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn has_affixes(path: &Path, prefix: &str, suffix: &str) -> bool {
    path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(prefix) && n.ends_with(suffix))
}

fn hash(text: &HostTensor) -> String {
    hex(Sha256::digest(text.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(first: u32, real: usize) -> Tokens {
        Tokens { ids: vec![first, 2, 3, 3], real: 0..real }
    }

    fn key(first: u32) -> Key {
        Key::new("weights", "cpu", DType::F32, &tokens(first, 2), &[9, 18], 100)
    }

    fn text(value: f32) -> HostTensor {
        HostTensor::from_f32([4, 100], vec![value; 400]).unwrap()
    }

    #[test]
    fn a_text_comes_back_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TextCache::new(folder.path().join("made/when/needed"));
        assert!(cache.get(&key(1)).is_none() && !cache.contains(&key(1)));
        let values: Vec<f32> = (0..400).map(|i| 1.0 / (i as f32 - 7.5)).collect();
        let kept = HostTensor::from_f32([4, 100], values).unwrap();
        cache.put(&key(1), &kept).unwrap();
        assert!(cache.contains(&key(1)));
        assert_eq!(cache.get(&key(1)).unwrap(), kept);
        assert!(cache.get(&key(2)).is_none());
        assert_eq!(cache.usage().0, 1);
    }

    #[test]
    fn everything_that_changes_the_values_changes_the_key() {
        let name_of = |weights, numerics, dtype, tokens, states: &[usize]| {
            Key::new(weights, numerics, dtype, &tokens, states, 100).name
        };
        let name = |weights, numerics, dtype, tokens| name_of(weights, numerics, dtype, tokens, &[9, 18]);
        let one = name("w", "cpu", DType::F32, tokens(1, 2));
        assert_eq!(one, name("w", "cpu", DType::F32, tokens(1, 2)));
        let others = [
            name("v", "cpu", DType::F32, tokens(1, 2)),
            name("w", "gpu", DType::F32, tokens(1, 2)),
            name("w", "cpu", DType::BF16, tokens(1, 2)),
            name("w", "cpu", DType::F32, tokens(5, 2)),
            // The same ids, but one of them belongs to the text instead of the padding.
            name("w", "cpu", DType::F32, tokens(1, 3)),
            name("wc", "pu", DType::F32, tokens(1, 2)),
            name_of("w", "cpu", DType::F32, tokens(1, 2), &[18, 9]),
        ];
        assert!(others.iter().all(|other| *other != one));
    }

    #[test]
    fn damaged_entries_are_not_used_and_can_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TextCache::new(folder.path());
        let path = cache.path(&key(1));
        cache.put(&key(1), &text(1.0)).unwrap();
        let good = fs::read(&path).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() - 3] ^= 1;
        for bad in [&flipped[..], &good[..good.len() - 1], &good[..4], b""] {
            fs::write(&path, bad).unwrap();
            assert!(cache.get(&key(1)).is_none(), "{} bytes", bad.len());
        }
        // Undamaged, but of another size.
        let short = HostTensor::from_f32([2, 100], vec![1.0; 200]).unwrap();
        cache.put(&key(1), &short).unwrap();
        assert!(cache.get(&key(1)).is_none());
        cache.put(&key(1), &text(1.0)).unwrap();
        assert_eq!(cache.get(&key(1)).unwrap(), text(1.0));
    }

    #[test]
    fn the_least_recently_used_entry_is_evicted() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TextCache::new(folder.path()).with_limit(6000);
        let age = |i: u32, seconds| {
            let file = File::options().append(true).open(cache.path(&key(i))).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
        };
        for i in 1..=3 {
            cache.put(&key(i), &text(1.0)).unwrap();
            age(i, 100 - u64::from(i));
        }
        // The first is the oldest, but is used again.
        assert!(cache.get(&key(1)).is_some());
        cache.put(&key(4), &text(1.0)).unwrap();
        assert!([1, 3, 4].iter().all(|i| cache.contains(&key(*i))) && !cache.contains(&key(2)));
        assert!(cache.usage().1 <= 6000, "{:?}", cache.usage());
        // A text above the limit is not stored.
        let tight = TextCache::new(folder.path()).with_limit(1000);
        tight.put(&key(5), &text(1.0)).unwrap();
        assert!(!tight.contains(&key(5)) && cache.usage().0 == 3);
    }

    #[test]
    fn old_temporary_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TextCache::new(folder.path());
        let (old, new) = (folder.path().join(".kiln-a.tmp"), folder.path().join(".kiln-b.tmp"));
        fs::write(&new, "x").unwrap();
        File::create(&old).unwrap().set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        cache.put(&key(1), &text(1.0)).unwrap();
        assert!(!old.exists() && new.exists());
    }

    #[test]
    fn many_writers_and_readers_see_whole_entries_only() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TextCache::new(folder.path()).with_limit(9000);
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let cache = &cache;
                scope.spawn(move || {
                    for i in 0..40 {
                        let n = (i + thread) % 8;
                        cache.put(&key(n), &text(n as f32)).unwrap();
                        if let Some(found) = cache.get(&key((n + 3) % 8)) {
                            assert_eq!(found, text(((n + 3) % 8) as f32));
                        }
                    }
                });
            }
        });
        assert!(cache.usage().0 > 0);
    }

    #[test]
    fn a_folder_that_can_not_be_created_is_an_error_that_names_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = TextCache::new(file.path()).put(&key(1), &text(1.0)).unwrap_err().to_string();
        assert!(message.contains(&file.path().display().to_string()), "{message}");
    }
}

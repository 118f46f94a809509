//! Encoded texts kept on disk, so that a prompt is encoded once.
//!
//! An entry is a safetensors file named after all that its values depend on: the text encoder's weights, the token ids,
//! the arithmetic, and the program itself, since the next build may round otherwise. So an entry is never out of date,
//! and using one changes no bit of the result. Entries are written whole or not at all, carry a hash of their values,
//! and are never changed: several programs may share a folder. The ones that were used longest ago make room.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use kiln_model::tokenizer::Tokens;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::{WeightSource, save};
use sha2::{Digest, Sha256};

/// Bytes a folder may hold when nothing else is said.
const DEFAULT_LIMIT: u64 = 256 << 20;
const PREFIX: &str = "text-";
const SUFFIX: &str = ".safetensors";
const TENSOR: &str = "text";
const HASH: &str = "sha256";
/// Files that a program left unfinished are removed when they are older than any write takes.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A folder of encoded texts.
#[derive(Clone, Debug)]
pub struct TextCache {
    folder: PathBuf,
    limit: u64,
}

/// What an encoded text depends on.
pub(crate) struct Key {
    name: String,
    shape: [usize; 2],
    dtype: DType,
}

impl Key {
    /// Of `tokens` encoded `text_dim` wide, with the encoder of this `fingerprint`, computed as `numerics` says.
    pub fn new(fingerprint: &str, numerics: &str, dtype: DType, tokens: &Tokens, text_dim: usize) -> Key {
        let mut hash = Sha256::new();
        hash.update(b"kiln text 1\n");
        for part in [fingerprint, numerics, dtype.name(), &PROGRAM] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.update((tokens.real as u64).to_le_bytes());
        tokens.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        Key { name: hex(hash), shape: [tokens.ids.len(), text_dim], dtype }
    }
}

/// This build of the program.
static PROGRAM: LazyLock<String> = LazyLock::new(|| {
    let about = std::env::current_exe().and_then(fs::metadata).ok();
    let written = about.as_ref().and_then(|m| m.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok());
    format!("{} {:?} {:?}", env!("CARGO_PKG_VERSION"), about.map(|m| m.len()), written)
});

impl TextCache {
    /// The cache in `folder`, which is made when the first text is kept; at most 256 MiB.
    pub fn new(folder: impl Into<PathBuf>) -> TextCache {
        TextCache { folder: folder.into(), limit: DEFAULT_LIMIT }
    }

    /// The same with room for so many bytes.
    pub fn with_limit(self, limit: u64) -> TextCache {
        TextCache { limit, ..self }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The bytes it may hold.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// How many texts are kept, and their bytes.
    pub fn usage(&self) -> (usize, u64) {
        let entries = self.entries();
        (entries.len(), entries.iter().map(|e| e.bytes).sum())
    }

    /// Whether there is an entry; whether it is sound shows only when it is read.
    pub(crate) fn contains(&self, key: &Key) -> bool {
        self.path(key).is_file()
    }

    /// The text, if it is here and sound.
    pub(crate) fn get(&self, key: &Key) -> Option<HostTensor> {
        let path = self.path(key);
        // Read, not mapped: another program may remove it meanwhile.
        let source = WeightSource::from_bytes(&path, fs::read(&path).ok()?).ok()?;
        let text = source.tensor(TENSOR).ok()?;
        let sound = text.shape().dims() == key.shape
            && text.dtype() == key.dtype
            && source.metadata().get(HASH) == Some(&hash(&text));
        if !sound {
            return None;
        }
        // When an entry was used last decides what makes room. Failing to say so costs an encoding at worst.
        let _ =
            File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(text)
    }

    /// Keeps a text, and makes room for it.
    pub(crate) fn put(&self, key: &Key, text: &HostTensor) -> kiln_weights::Result<()> {
        let size = text.bytes().len() as u64;
        if size > self.limit {
            return Ok(());
        }
        let path = self.path(key);
        let failed = |source| kiln_weights::Error::Io { doing: "make", file: self.folder.clone(), source };
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let metadata = BTreeMap::from([(HASH.to_owned(), hash(text))]);
        save::save(&path, &[(TENSOR, text.clone())], &metadata)?;
        self.make_room(&path);
        Ok(())
    }

    /// Removes what was used longest ago until the rest fits; `newest` stays. Another program may do the same at the
    /// same time: a file that is gone already is as good as removed.
    fn make_room(&self, newest: &Path) {
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
            let about = fs::metadata(&path).ok()?;
            Some(Entry { bytes: about.len(), used: about.modified().ok()?, path })
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
    hex(Sha256::new().chain_update(text.bytes()))
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(first: u32, real: usize) -> Tokens {
        Tokens { ids: vec![first, 2, 3, 3], real }
    }

    fn key(first: u32) -> Key {
        Key::new("weights", "cpu", DType::F32, &tokens(first, 2), 100)
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
        let name = |weights, numerics, dtype, tokens| Key::new(weights, numerics, dtype, &tokens, 100).name;
        let one = name("w", "cpu", DType::F32, tokens(1, 2));
        assert_eq!(one, name("w", "cpu", DType::F32, tokens(1, 2)));
        let others = [
            name("v", "cpu", DType::F32, tokens(1, 2)),
            name("w", "gpu", DType::F32, tokens(1, 2)),
            name("w", "cpu", DType::BF16, tokens(1, 2)),
            name("w", "cpu", DType::F32, tokens(5, 2)),
            // As many ids, but one of them typed, not padding.
            name("w", "cpu", DType::F32, tokens(1, 3)),
            name("wc", "pu", DType::F32, tokens(1, 2)),
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
        // Sound, but of another size.
        let short = HostTensor::from_f32([2, 100], vec![1.0; 200]).unwrap();
        cache.put(&key(1), &short).unwrap();
        assert!(cache.get(&key(1)).is_none());
        cache.put(&key(1), &text(1.0)).unwrap();
        assert_eq!(cache.get(&key(1)).unwrap(), text(1.0));
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
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
        // What alone is too large is not kept at all.
        let tight = TextCache::new(folder.path()).with_limit(1000);
        tight.put(&key(5), &text(1.0)).unwrap();
        assert!(!tight.contains(&key(5)) && cache.usage().0 == 3);
    }

    #[test]
    fn unfinished_files_of_others_are_removed_when_they_are_old() {
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
    fn a_folder_that_can_not_be_made_is_an_error_that_names_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let told = TextCache::new(file.path()).put(&key(1), &text(1.0)).unwrap_err().to_string();
        assert!(told.contains(&file.path().display().to_string()), "{told}");
    }
}

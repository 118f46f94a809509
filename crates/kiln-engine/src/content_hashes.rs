//! The hashes of weights, remembered in a file: an encoder of 8 GB is read once, not at every start.
//!
//! A hash is remembered under the identity of the files, which any change of them changes
//! ([`FileIdentity`](kiln_base::FileIdentity)). Programs that write the file at the same time may forget a hash, which costs
//! time only.

use std::fs;
use std::path::{Path, PathBuf};

use kiln_base::write_atomic;
use kiln_weights::WeightSource;

/// Number of hashes that are remembered; the oldest are forgotten.
const CAPACITY: usize = 200;
const NAME: &str = "weights.txt";

/// The remembered hashes in a folder.
#[derive(Clone, Debug)]
pub struct ContentHashes {
    file: PathBuf,
}

impl ContentHashes {
    /// The hashes in `folder`, which is created with the first of them.
    pub fn new(folder: &Path) -> ContentHashes {
        ContentHashes { file: folder.join(NAME) }
    }

    /// Returns the [content hash](WeightSource::content_hash) of weights. Reads them only if it is not remembered.
    pub fn of(&self, weights: &WeightSource) -> String {
        let identity = weights.content_identity();
        let known = identity.as_ref().and_then(|identity| self.get(identity));
        known.unwrap_or_else(|| {
            let hash = weights.content_hash();
            // Not if the files were changed meanwhile.
            if let Some(identity) =
                identity.filter(|before| weights.content_identity().as_ref() == Some(before))
            {
                self.put(&identity, &hash);
            }
            hash
        })
    }

    fn get(&self, identity: &str) -> Option<String> {
        let text = fs::read_to_string(&self.file).ok()?;
        let hash = text.lines().rev().find_map(|line| line.strip_prefix(identity)?.strip_prefix(' '))?;
        // Not one that was cut off.
        (hash.len() == 64).then(|| hash.to_owned())
    }

    /// Ignores failures: the weights are read again.
    fn put(&self, identity: &str, hash: &str) {
        let known = fs::read_to_string(&self.file).unwrap_or_default();
        let others: Vec<&str> = known.lines().filter(|line| !line.starts_with(identity)).collect();
        let recent = &others[others.len().saturating_sub(CAPACITY - 1)..];
        let text: String = recent.iter().map(|line| format!("{line}\n")).collect();
        let _ = self.file.parent().map(fs::create_dir_all);
        let _ = write_atomic(&self.file, format!("{text}{identity} {hash}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_hashes_are_remembered_and_damaged_ones_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let hashes = ContentHashes::new(&folder.path().join("new"));
        let (hash, identity) = (|i: usize| format!("{i:064}"), |i: usize| format!("id{i:062}"));
        assert_eq!(hashes.get(&identity(0)), None);
        for i in 0..CAPACITY + 2 {
            hashes.put(&identity(i), &hash(i));
        }
        assert_eq!([0, 1, 2].map(|i| hashes.get(&identity(i)).is_some()), [false, false, true]);
        hashes.put(&identity(2), &hash(7));
        assert_eq!(hashes.get(&identity(2)), Some(hash(7)));
        let text = fs::read(&hashes.file).unwrap();
        fs::write(&hashes.file, &text[..text.len() - 9]).unwrap();
        assert_eq!(hashes.get(&identity(2)), None);
    }
}

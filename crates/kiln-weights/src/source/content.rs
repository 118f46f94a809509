//! The hash of everything that a source's values depend on, and the identity of its files.
//!
//! The hash reads every byte, on all cores: data is cut into leaves, and the digests of the leaves are hashed in order. A
//! result is worth remembering as long as the files' identity stays the same.

use kiln_base::{FileIdentity, hex};
use kiln_tensor::{DType, Shape};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::WeightSource;
use crate::encoding::TensorEntry;
use crate::file::WeightFile;
use crate::source_tensor::SourceTensor;

/// Bytes that one thread hashes at a time.
const LEAF: usize = 4 << 20;

impl WeightSource {
    /// Tells whether the files are the same and unchanged, without reading them: device, inode, size and times of each.
    /// `None` if they are in memory.
    ///
    /// Two sources that are open at the same time and have the same identity read the same files.
    pub fn file_identity(&self) -> Option<String> {
        Some(self.identities()?.iter().map(FileIdentity::as_str).collect::<Vec<_>>().join("\n"))
    }

    /// A text under which [`content_hash`](WeightSource::content_hash) may be remembered; `None` if the files are in memory,
    /// or so new that another change might not show in their times.
    pub fn content_identity(&self) -> Option<String> {
        let identities = self.identities()?;
        if !identities.iter().all(FileIdentity::is_settled) {
            return None;
        }
        let mut hash = Sha256::new();
        hash.update(b"kiln identity 1\n");
        identities.iter().for_each(|one| put(&mut hash, one.as_str().as_bytes()));
        for part in self.parts() {
            part.describe(&mut hash);
            hash.update((part.start as u64).to_le_bytes());
        }
        Some(hex(hash.finalize()))
    }

    fn identities(&self) -> Option<Vec<FileIdentity>> {
        let identity = |file: &WeightFile| FileIdentity::of(file.mapped.as_ref()?.file(), &file.path).ok();
        let all: Vec<_> = self.files.iter().map(identity).collect::<Option<_>>()?;
        (!all.is_empty()).then_some(all)
    }

    /// A SHA-256, in hex, of everything that the values of the tensors depend on: name, dtype, shape, encoding and every
    /// byte of each, in the order of names. Reads all of them, unlike [`fingerprint`](WeightSource::fingerprint).
    ///
    /// It doesn't cover file names, the division into shards, the order in the file, and what a text encoder in a
    /// safetensors file has beside its layers.
    pub fn content_hash(&self) -> String {
        let parts: Vec<Part<'_>> = self.parts().collect();
        let leaves: Vec<(&Part<'_>, &[u8])> =
            parts.iter().flat_map(|part| part.data.chunks(LEAF).map(move |leaf| (part, leaf))).collect();
        let digests: Vec<[u8; 32]> = leaves
            .par_iter()
            .map(|(part, leaf)| {
                let digest = Sha256::digest(leaf).into();
                // What is only hashed should not count as this process's memory.
                if let Some(mapped) = &part.file.mapped {
                    let start = leaf.as_ptr().addr() - part.file.all().as_ptr().addr();
                    mapped.release(start, leaf.len());
                }
                digest
            })
            .collect();
        let mut digests = digests.iter();
        let mut hash = Sha256::new();
        hash.update(b"kiln content 1\n");
        hash.update([u8::from(self.has_interleaved_rotary())]);
        for part in &parts {
            part.describe(&mut hash);
            digests.by_ref().take(part.data.len().div_ceil(LEAF)).for_each(|digest| hash.update(digest));
        }
        hex(hash.finalize())
    }

    /// All that is hashed: each tensor and its scales.
    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        self.fingerprinted().flat_map(move |(name, tensor)| {
            let SourceTensor { entry, shape, .. } = tensor;
            let range = tensor.range();
            let file = &self.files[tensor.file];
            let own = Part {
                name,
                dtype: entry.dtype,
                shape,
                encoding: format!("{} {}", entry.encoding.description(), tensor.view_name()),
                file,
                start: range.start,
                data: &file.all()[range],
            };
            let scales = entry
                .encoding
                .scales()
                .map(|scale| Part::stored(&scale.name, &scale.entry, &self.files[scale.file]));
            std::iter::once(own).chain(scales)
        })
    }
}

/// A tensor, or the scales of one.
struct Part<'s> {
    name: &'s str,
    dtype: DType,
    shape: &'s Shape,
    encoding: String,
    file: &'s WeightFile,
    start: usize,
    data: &'s [u8],
}

impl<'s> Part<'s> {
    fn stored(name: &'s str, entry: &'s TensorEntry, file: &'s WeightFile) -> Part<'s> {
        let (dtype, shape, start) = (entry.dtype, &entry.shape, entry.range.start);
        Part { name, dtype, shape, encoding: String::new(), file, start, data: file.bytes(entry) }
    }

    /// Hashes all but the data.
    fn describe(&self, hash: &mut Sha256) {
        put(hash, self.name.as_bytes());
        put(hash, format!("{} {} {}", self.dtype, self.shape, self.encoding).as_bytes());
        hash.update((self.data.len() as u64).to_le_bytes());
    }
}

/// Hashes a field with its length, so that different lists of fields never give the same bytes.
fn put(hash: &mut Sha256, field: &[u8]) {
    hash.update((field.len() as u64).to_le_bytes());
    hash.update(field);
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_tensor::HostTensor;

    use crate::save;

    #[test]
    fn a_file_that_was_just_written_has_no_identity_to_remember() {
        let dir = tempfile::tempdir().unwrap();
        save::save(dir.path().join("a.safetensors"), &[("x", HostTensor::zeros([2]))], &Default::default())
            .unwrap();
        let source = WeightSource::open(dir.path()).unwrap();
        assert!(source.file_identity().is_some() && source.content_identity().is_none());
    }

    #[test]
    fn a_file_replaced_by_rename_has_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let (file, new) = (dir.path().join("a.safetensors"), dir.path().join("new.safetensors"));
        let write = |path| save::save(path, &[("x", HostTensor::zeros([2]))], &Default::default()).unwrap();
        write(&file);
        // Not kept open: Windows replaces no file that is mapped.
        let identity = || WeightSource::open(&file).unwrap().file_identity();
        let old = identity();
        assert_eq!(old, identity());
        write(&new);
        std::fs::rename(&new, &file).unwrap();
        assert_ne!(old, identity());
        let bytes = std::fs::read(&file).unwrap();
        assert_eq!(WeightSource::from_bytes("a", bytes).unwrap().file_identity(), None);
    }

    #[test]
    fn every_byte_of_a_tensor_of_several_leaves_counts() {
        let values = vec![0u8; 2 * LEAF + 12];
        let hash = |at: Option<usize>| {
            let mut values = values.clone();
            if let Some(at) = at {
                values[at] = 1;
            }
            let tensor = HostTensor::new(DType::F32, [values.len() / 4], values.into()).unwrap();
            let dir = tempfile::tempdir().unwrap();
            save::save(dir.path().join("a.safetensors"), &[("x", tensor)], &Default::default()).unwrap();
            WeightSource::open(dir.path()).unwrap().content_hash()
        };
        let none = hash(None);
        assert_eq!(none, hash(None));
        for at in [0, 5000, LEAF - 1, LEAF, LEAF + LEAF / 3, 2 * LEAF + 11] {
            assert_ne!(none, hash(Some(at)), "byte {at}");
        }
    }
}

//! One mapped safetensors or GGUF file.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kiln_tensor::HostTensor;

use crate::encoding::TensorEntry;
use crate::gguf::MetadataArray;
use crate::header::Header;
use crate::map::MappedFile;
use crate::{Error, MalformedFile, Result, gguf};

/// A safetensors or GGUF file: its bytes, mapped or in memory, and its validated header.
#[derive(Clone)]
pub(crate) struct WeightFile {
    pub path: PathBuf,
    pub metadata: BTreeMap<String, String>,
    arrays: BTreeMap<String, usize>,
    pub entries: BTreeMap<String, TensorEntry>,
    data: Bytes,
    /// The map behind `data`, if there is one.
    pub mapped: Option<Arc<MappedFile>>,
}

impl WeightFile {
    pub fn open(path: &Path) -> Result<WeightFile> {
        let io = |doing| move |source| Error::Io { doing, file: path.to_owned(), source };
        // Before opening: a pipe would make `open` wait forever, and an empty file can't be mapped.
        let metadata = fs::metadata(path).map_err(|e| not_found_or(path, e))?;
        if !metadata.is_file() {
            return Err(Error::NotAFile { file: path.to_owned() });
        }
        if metadata.len() == 0 {
            return Err(Error::Malformed { file: path.to_owned(), problem: MalformedFile::Empty });
        }
        let file = File::open(path).map_err(io("open"))?;
        let mapped = MappedFile::new(file).map_err(io("map"))?;
        let read = WeightFile::from_bytes(path, mapped.bytes())?;
        Ok(WeightFile { mapped: Some(mapped), ..read })
    }

    pub fn from_bytes(path: &Path, data: Bytes) -> Result<WeightFile> {
        let header =
            if data.starts_with(gguf::MAGIC) { gguf::read_header(&data) } else { Header::read(&data) };
        let header = header.map_err(|problem| Error::Malformed { file: path.to_owned(), problem })?;
        Ok(WeightFile {
            path: path.to_owned(),
            metadata: header.metadata,
            arrays: header.arrays,
            entries: header.entries,
            data,
            mapped: None,
        })
    }

    /// An array of texts or integers in a GGUF file's metadata.
    pub fn array(&self, key: &str) -> Result<Option<MetadataArray<'_>>> {
        let Some(&at) = self.arrays.get(key) else { return Ok(None) };
        gguf::read_array(&self.data, at)
            .map_err(|problem| Error::Malformed { file: self.path.clone(), problem })
    }

    /// The dense tensor at `entry`, which must be of this file; shares the file's bytes.
    pub fn tensor(&self, name: &str, entry: &TensorEntry) -> Result<HostTensor> {
        HostTensor::new(entry.dtype, &entry.shape, self.data.slice(entry.range.clone()))
            .map_err(|source| Error::Tensor { file: self.path.clone(), tensor: name.to_owned(), source })
    }

    /// Releases the pages of `entry`, which must be of this file, after all of it was read.
    pub fn release(&self, entry: &TensorEntry) {
        if let Some(mapped) = &self.mapped {
            mapped.release(entry.range.start, entry.range.len());
        }
    }

    /// All bytes of the file.
    pub fn all(&self) -> &[u8] {
        &self.data
    }

    /// The bytes of `entry`, shared.
    pub fn data(&self, entry: &TensorEntry) -> Bytes {
        self.data.slice(entry.range.clone())
    }

    /// Whether it is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.data.starts_with(gguf::MAGIC)
    }

    /// The bytes of `entry`, which must be of this file.
    pub fn bytes(&self, entry: &TensorEntry) -> &[u8] {
        &self.data[entry.range.clone()]
    }
}

// Not derived: that would print the weights.
impl fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightFile").field("path", &self.path).field("bytes", &self.data.len()).finish()
    }
}

/// The error for a path whose metadata can't be read.
pub(crate) fn not_found_or(path: &Path, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path: path.to_owned() },
        _ => Error::Io { doing: "open", file: path.to_owned(), source },
    }
}

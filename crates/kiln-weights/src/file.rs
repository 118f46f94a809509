use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kiln_tensor::HostTensor;

use crate::header::{Entry, Header};
use crate::map::Mapped;
use crate::{Error, Malformed, Result, gguf};

/// One safetensors or GGUF file: its bytes (mapped, or in memory) and its checked header.
#[derive(Clone)]
pub(crate) struct WeightFile {
    pub path: PathBuf,
    pub metadata: BTreeMap<String, String>,
    pub entries: BTreeMap<String, Entry>,
    data: Bytes,
    /// The map behind `data`, when there is one.
    pub mapped: Option<Arc<Mapped>>,
}

impl WeightFile {
    pub fn open(path: &Path) -> Result<WeightFile> {
        let io = |doing| move |source| Error::Io { doing, file: path.to_owned(), source };
        // Before opening: a pipe would make `open` wait forever, and an empty file can't be mapped.
        let about = fs::metadata(path).map_err(|e| not_found_or(path, e))?;
        if !about.is_file() {
            return Err(Error::NotAFile { file: path.to_owned() });
        }
        if about.len() == 0 {
            return Err(Error::Malformed { file: path.to_owned(), problem: Malformed::Empty });
        }
        let file = File::open(path).map_err(io("open"))?;
        let mapped = Mapped::new(file).map_err(io("map"))?;
        let read = WeightFile::from_bytes(path, mapped.bytes())?;
        Ok(WeightFile { mapped: Some(mapped), ..read })
    }

    pub fn from_bytes(path: &Path, data: Bytes) -> Result<WeightFile> {
        let header = match data.starts_with(gguf::MAGIC) {
            true => gguf::read(&data),
            false => Header::read(&data),
        };
        let header = header.map_err(|problem| Error::Malformed { file: path.to_owned(), problem })?;
        Ok(WeightFile {
            path: path.to_owned(),
            metadata: header.metadata,
            entries: header.entries,
            data,
            mapped: None,
        })
    }

    /// The plain tensor at `entry`, which must be of this file; shares the file's bytes.
    pub fn tensor(&self, name: &str, entry: &Entry) -> Result<HostTensor> {
        HostTensor::new(entry.dtype, &entry.shape, self.data.slice(entry.range.clone()))
            .map_err(|source| Error::Tensor { file: self.path.clone(), tensor: name.to_owned(), source })
    }

    /// Lets go of the pages of `entry`, which must be of this file, after all of it was read.
    pub fn release(&self, entry: &Entry) {
        if let Some(mapped) = &self.mapped {
            mapped.release(entry.range.start, entry.range.len());
        }
    }

    /// All its bytes.
    pub fn all(&self) -> &[u8] {
        &self.data
    }

    /// The bytes of `entry`, shared.
    pub fn data(&self, entry: &Entry) -> Bytes {
        self.data.slice(entry.range.clone())
    }

    /// Whether it is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.data.starts_with(gguf::MAGIC)
    }

    /// The bytes of `entry`, which must be of this file.
    pub fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.data[entry.range.clone()]
    }
}

// The derived one would print the weights.
impl fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightFile").field("path", &self.path).field("bytes", &self.data.len()).finish()
    }
}

/// The error for a path that can't be looked at.
pub(crate) fn not_found_or(path: &Path, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path: path.to_owned() },
        _ => Error::Io { doing: "open", file: path.to_owned(), source },
    }
}

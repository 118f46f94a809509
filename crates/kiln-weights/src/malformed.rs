//! What can be wrong with a safetensors or GGUF file.

use kiln_tensor::Shape;

use crate::{dtypes, gguf_types};

/// The largest dimension of a tensor without elements.
const MAX_EMPTY_DIM: usize = 1 << 20;

/// Rejects an empty tensor with a huge dimension: no data in the file backs the size of buffers made for it.
pub(crate) fn check_empty(tensor: &str, shape: &Shape) -> Result<(), MalformedFile> {
    if shape.dims().contains(&0) && shape.dims().iter().any(|d| *d > MAX_EMPTY_DIM) {
        return Err(MalformedFile::OversizedEmpty { tensor: tensor.to_owned(), shape: shape.clone() });
    }
    Ok(())
}

/// What is wrong with a file that should be safetensors or GGUF. [`crate::Error::Malformed`] adds its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum MalformedFile {
    /// No bytes at all.
    #[error("the file is empty")]
    Empty,
    /// A file of another format.
    #[error("it is {0}")]
    OtherFormat(&'static str),
    /// Too short for the length of the header.
    #[error("expected at least 8 bytes (the header's length), found {found}")]
    TooShort { found: usize },
    /// The header's length reaches past the end of the file.
    #[error("it announces a header of {header} bytes, but has {available} bytes after that number")]
    HeaderLength {
        /// The length in the file's first 8 bytes.
        header: u64,
        available: usize,
    },
    /// A header longer than the format allows.
    #[error("it announces a header of {header} bytes, more than the {limit} that the format allows")]
    HeaderTooLong {
        /// The length in the file's first 8 bytes.
        header: u64,
        limit: u64,
    },
    /// A header that is not the expected JSON.
    #[error("its header is not JSON of tensors: {reason}")]
    NotJson { reason: String },
    /// A name that is in the header twice.
    #[error("its header names tensor `{tensor}` twice")]
    DuplicateTensor { tensor: String },
    /// A part of a GGUF file that llama.cpp has split.
    #[error("it is part {number} of {count} of a split GGUF file")]
    SplitGguf { number: u64, count: u64 },
    /// An unsupported dtype.
    #[error("tensor `{tensor}` has dtype {dtype}{}; Kiln reads {}", dtypes::meaning(dtype), dtypes::names())]
    DType { tensor: String, dtype: String },
    /// Data that ends before it starts.
    #[error("the data of tensor `{tensor}` ends at byte {end}, before its start at {start}")]
    ReversedOffsets { tensor: String, start: usize, end: usize },
    /// Data that starts inside another tensor's.
    #[error("the data of tensor `{tensor}` starts at byte {start}, inside `{other}`, which ends at {end}")]
    Overlap { tensor: String, start: usize, other: String, end: usize },
    /// Bytes that belong to no tensor.
    #[error(
        "the data of tensor `{tensor}` starts at byte {start}, expected {expected}: the bytes between belong to no tensor"
    )]
    Gap { tensor: String, start: usize, expected: usize },
    /// Data of another size than shape and dtype need.
    #[error("tensor `{tensor}`, {dtype} {shape}, needs {expected} bytes, but its offsets span {found}")]
    SizeMismatch { tensor: String, dtype: &'static str, shape: Shape, expected: usize, found: usize },
    /// More elements than memory can address.
    #[error("tensor `{tensor}` has shape {shape}, which is too large for any memory")]
    TooLarge { tensor: String, shape: Shape },
    /// No elements, but a huge dimension.
    #[error("tensor `{tensor}` has shape {shape}: no elements, but a huge dimension")]
    OversizedEmpty { tensor: String, shape: Shape },
    /// The file ends before the data its header describes.
    #[error(
        "its header describes {expected} bytes of data, found {found}: the file ends inside or before `{tensor}`; \
         it was probably not downloaded completely"
    )]
    Truncated { tensor: String, expected: usize, found: usize },
    /// The file continues after the data its header describes.
    #[error("its header describes {expected} bytes of data, found {found}: the rest belongs to no tensor")]
    Trailing { expected: usize, found: usize },
    /// An invalid GGUF header.
    #[error("{problem}")]
    Gguf { problem: String },
    /// A GGUF type that Kiln can't read.
    #[error(
        "tensor `{tensor}` is stored as {dtype}, which Kiln does not support; take a {instead} file of the same model \
         (Kiln reads {})",
        gguf_types::supported_types()
    )]
    GgufType { tensor: String, dtype: &'static str, instead: &'static str },
    /// A GGUF type that did not exist when Kiln was written, or never.
    #[error(
        "tensor `{tensor}` has type number {id}, which Kiln does not know: the file is newer than this Kiln, or \
         damaged; take a Q4_K or IQ4_XS file of the same model (Kiln reads {})",
        gguf_types::supported_types()
    )]
    UnknownGgufType { tensor: String, id: u32 },
    /// Rejected by the safetensors crate for another reason.
    #[error("{0}")]
    Other(String),
}

impl MalformedFile {
    /// Whether the file may well be valid, but is of a kind that Kiln can't read.
    pub(crate) fn is_unsupported(&self) -> bool {
        use MalformedFile::{GgufType, SplitGguf, UnknownGgufType};
        matches!(self, GgufType { .. } | UnknownGgufType { .. } | SplitGguf { .. })
    }
}

use kiln_tensor::Shape;

use crate::{dtypes, gguf};

/// The largest dimension of a tensor without elements.
const MOST_EMPTY: usize = 1 << 20;

/// Refuses a tensor whose dimensions nothing in the file stands for.
pub(crate) fn check_empty(tensor: &str, shape: &Shape) -> Result<(), Malformed> {
    let large = shape.dims().contains(&0) && shape.dims().iter().any(|d| *d > MOST_EMPTY);
    match large {
        true => Err(Malformed::EmptyAndLarge { tensor: tensor.to_owned(), shape: shape.clone() }),
        false => Ok(()),
    }
}

/// What is wrong with a file that should be safetensors or GGUF. [`crate::Error::Malformed`] adds its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// No bytes at all.
    #[error("the file is empty")]
    Empty,
    /// Another kind of file.
    #[error("it is {0}")]
    Foreign(&'static str),
    /// Too short even for the length of its header.
    #[error("expected at least 8 bytes (the header's length), found {found}")]
    TooShort {
        /// Bytes in the file.
        found: usize,
    },
    /// The header's length reaches past the end of the file.
    #[error("it announces a header of {header} bytes, but has {available} bytes after that number")]
    HeaderLength {
        /// Length that the file's first 8 bytes give.
        header: u64,
        /// Bytes behind them.
        available: usize,
    },
    /// A header longer than any real one.
    #[error("it announces a header of {header} bytes, more than the {limit} that the format allows")]
    HeaderTooLong {
        /// Length that the file's first 8 bytes give.
        header: u64,
        /// The longest that is accepted.
        limit: u64,
    },
    /// The header isn't the JSON it should be.
    #[error("its header is not JSON of tensors: {reason}")]
    NotJson {
        /// What the JSON reader says.
        reason: String,
    },
    /// One name twice in the header.
    #[error("its header names tensor `{tensor}` twice")]
    Twice {
        /// The tensor.
        tensor: String,
    },
    /// An element type Kiln has no use for.
    #[error("tensor `{tensor}` has dtype {dtype}; Kiln reads {}", dtypes::names())]
    DType {
        /// The tensor.
        tensor: String,
        /// The header's name of the type.
        dtype: String,
    },
    /// Data that ends before it starts.
    #[error("the data of tensor `{tensor}` ends at byte {end}, before its start at {start}")]
    Reversed {
        /// The tensor.
        tensor: String,
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// Data that starts inside another tensor's.
    #[error("the data of tensor `{tensor}` starts at byte {start}, inside `{other}`, which ends at {end}")]
    Overlap {
        /// The tensor.
        tensor: String,
        /// Its first byte.
        start: usize,
        /// The tensor before it.
        other: String,
        /// One past that tensor's last byte.
        end: usize,
    },
    /// Bytes that belong to no tensor.
    #[error("the data of tensor `{tensor}` starts at byte {start}, expected {expected}: bytes without owner")]
    Hole {
        /// The tensor behind the hole.
        tensor: String,
        /// Its first byte.
        start: usize,
        /// Where the tensor before it ends.
        expected: usize,
    },
    /// Shape and dtype need another number of bytes.
    #[error("tensor `{tensor}`, {dtype} {shape}, needs {expected} bytes, but its offsets span {found}")]
    Size {
        /// The tensor.
        tensor: String,
        /// The header's name of its type.
        dtype: &'static str,
        /// Its shape.
        shape: Shape,
        /// Bytes that type and shape need.
        expected: usize,
        /// Bytes between its offsets.
        found: usize,
    },
    /// More elements than a machine can address.
    #[error("tensor `{tensor}` has shape {shape}, which no machine can hold")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Shape,
    },
    /// No elements, but a dimension that buffers for rows or columns would be made by.
    #[error("tensor `{tensor}` has shape {shape}: no elements, and a dimension beyond all use")]
    EmptyAndLarge {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Shape,
    },
    /// The file ends before the data its header describes.
    #[error(
        "its header describes {expected} bytes of data, found {found}: the file ends inside or before `{tensor}`; \
         it was probably not downloaded completely"
    )]
    Truncated {
        /// The first tensor that is not complete.
        tensor: String,
        /// Bytes of data the header describes.
        expected: usize,
        /// Bytes of data there are.
        found: usize,
    },
    /// The file goes on behind the data its header describes.
    #[error("its header describes {expected} bytes of data, found {found}: the rest belongs to no tensor")]
    Trailing {
        /// Bytes of data the header describes.
        expected: usize,
        /// Bytes of data there are.
        found: usize,
    },
    /// A GGUF header that makes no sense.
    #[error("{what}")]
    Gguf {
        /// What was found, and where.
        what: String,
    },
    /// A GGUF type that Kiln can't unpack.
    #[error("tensor `{tensor}` has type {dtype}; Kiln reads {}", gguf::names())]
    GgufType {
        /// The tensor.
        tensor: String,
        /// The type's name or number.
        dtype: String,
    },
    /// Refused by the safetensors library for another reason.
    #[error("{0}")]
    Other(String),
}

use crate::packed::Format;
use crate::{DType, Shape};

/// An invalid tensor or tensor operation.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// The element count of the shape does not fit the data.
    #[error("shape {shape} of {dtype} needs {expected} bytes, found {found}")]
    Length { shape: Shape, dtype: DType, expected: usize, found: usize },
    /// The product of the dimensions overflows.
    #[error("shape {0} is too large for this machine")]
    TooLarge(Shape),
    /// There is no conversion between these types.
    #[error("no conversion from {from} to {to}")]
    Conversion { from: DType, to: DType },
    /// A reshape changed the number of elements.
    #[error("can't reshape {from} to {to}: {} elements against {}", .from.numel(), .to.numel())]
    Reshape { from: Shape, to: Shape },
    /// A row range outside the tensor.
    #[error("rows {start}..{end} are outside shape {shape}")]
    Rows { start: usize, end: usize, shape: Shape },
    /// The data of a packed tensor has the wrong length.
    #[error("shape {shape} of {format} needs {expected} bytes, found {found}")]
    PackedLength { shape: Shape, format: Format, expected: usize, found: usize },
    /// A shape that is not a matrix or whose rows are not whole blocks.
    #[error("a matrix of shape {shape} can't be {format}, whose blocks have {} values", format.block_values())]
    Blocks { format: Format, shape: Shape },
    /// The number or kind of scales does not fit the packed tensor.
    #[error("{found} scales don't fit a packed tensor of shape {shape}")]
    Scales { shape: Shape, found: usize },
    /// A value that a format can't represent.
    #[error("it has a value of {value}, too large for {format}, which holds values up to {limit}")]
    OutOfRange { value: String, format: Format, limit: String },
    /// A format that is only read.
    #[error("Kiln reads {format}, but can't write it")]
    ReadOnly { format: Format },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

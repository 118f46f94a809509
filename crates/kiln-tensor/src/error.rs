use crate::packed::Format;
use crate::{DType, Shape};

/// An invalid tensor or tensor operation.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// The element count of the shape does not fit the data.
    #[error("shape {shape} of {dtype} needs {expected} bytes, found {found}")]
    Length {
        /// The requested shape.
        shape: Shape,
        /// The requested element type.
        dtype: DType,
        /// Bytes that shape and dtype need.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The product of the dimensions overflows.
    #[error("shape {0} is too large for this machine")]
    TooLarge(Shape),
    /// There is no conversion between these types.
    #[error("no conversion from {from} to {to}")]
    Conversion {
        /// The tensor's type.
        from: DType,
        /// The requested type.
        to: DType,
    },
    /// A reshape changed the number of elements.
    #[error("can't reshape {from} to {to}: {} elements against {}", .from.numel(), .to.numel())]
    Reshape {
        /// The tensor's shape.
        from: Shape,
        /// The requested shape.
        to: Shape,
    },
    /// A row range outside the tensor.
    #[error("rows {start}..{end} are outside shape {shape}")]
    Rows {
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// The tensor's shape.
        shape: Shape,
    },
    /// The data of a packed tensor has the wrong length.
    #[error("shape {shape} of {format} needs {expected} bytes, found {found}")]
    PackedLength {
        /// The tensor's shape.
        shape: Shape,
        /// Its format.
        format: Format,
        /// Bytes that shape and format need.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A shape that is not a matrix or whose rows are not whole blocks.
    #[error("a matrix of shape {shape} can't be {format}, whose blocks have {} values", format.block_values())]
    Blocks {
        /// The requested format.
        format: Format,
        /// The shape.
        shape: Shape,
    },
    /// The number or kind of scales does not fit the packed tensor.
    #[error("{found} scales don't fit a packed tensor of shape {shape}")]
    Scales {
        /// The tensor's shape.
        shape: Shape,
        /// Number of scales given.
        found: usize,
    },
    /// A value that a format can't represent.
    #[error("it has a value of {value}, too large for {format}, which holds values up to {limit}")]
    OutOfRange {
        /// The value.
        value: String,
        /// The requested format.
        format: Format,
        /// The largest value it can hold.
        limit: String,
    },
    /// A format that is only read.
    #[error("Kiln reads {format}, but can't write it")]
    ReadOnly {
        /// The requested format.
        format: Format,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

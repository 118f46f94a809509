use crate::packed::Format;
use crate::{DType, Shape};

/// What can be wrong with a tensor.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// The element count of the shape does not fit the data.
    #[error("shape {shape} of {dtype} needs {expected} bytes, found {found}")]
    Length {
        /// The shape that was asked for.
        shape: Shape,
        /// The element type that was asked for.
        dtype: DType,
        /// Bytes that shape and dtype need.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// The product of the dimensions overflows.
    #[error("shape {0} is too large for this machine")]
    TooLarge(Shape),
    /// The tensor holds another type than the one asked for.
    #[error("expected a tensor of {expected}, found {found}")]
    DType {
        /// The type asked for.
        expected: DType,
        /// The type the tensor has.
        found: DType,
    },
    /// No conversion between these types.
    #[error("no conversion from {from} to {to}")]
    Conversion {
        /// The type the tensor has.
        from: DType,
        /// The type asked for.
        to: DType,
    },
    /// A reshape changed the number of elements.
    #[error("can't reshape {from} to {to}: {} elements against {}", .from.numel(), .to.numel())]
    Reshape {
        /// The tensor's shape.
        from: Shape,
        /// The shape asked for.
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
    /// The bytes of a packed matrix are not as many as it needs.
    #[error("shape {shape} of {format} needs {expected} bytes, found {found}")]
    PackedLength {
        /// The matrix's shape.
        shape: Shape,
        /// How it is packed.
        format: Format,
        /// Bytes it needs.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// A shape that does not consist of whole blocks.
    #[error("a matrix of shape {shape} can't be {format}, whose blocks have {} values", format.block_values())]
    Blocks {
        /// The format asked for.
        format: Format,
        /// The shape.
        shape: Shape,
    },
    /// Scales that are too many or too few, or for another kind of matrix.
    #[error("{found} scales don't fit a packed matrix of shape {shape}")]
    Scales {
        /// The matrix's shape.
        shape: Shape,
        /// How many scales there are.
        found: usize,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

use crate::int8::MOST_COLUMNS;
use crate::{DType, Shape};

/// Why some tensors don't make a linear layer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LinearError {
    /// No matrix at all.
    #[error("a linear layer needs at least one weight")]
    NoWeight,
    /// Matrices without an element.
    #[error("a weight has shape [{rows}, {cols}], expected at least one element")]
    Empty {
        /// Rows of all matrices together.
        rows: usize,
        /// Columns of each.
        cols: usize,
    },
    /// A weight or an update that is no matrix.
    #[error("{what} has shape {found}, expected a matrix")]
    NotAMatrix {
        /// The tensor's part in the layer.
        what: &'static str,
        /// Its shape.
        found: Shape,
    },
    /// A tensor that doesn't fit the others.
    #[error("{what} has shape {found}, expected {expected}")]
    Shape {
        /// The tensor's part in the layer.
        what: &'static str,
        /// Its shape.
        found: Shape,
        /// The shape the other tensors ask for.
        expected: Shape,
    },
    /// A tensor that is not of the type its part in the layer needs.
    #[error("{what} is {found}, expected {expected}")]
    DType {
        /// The tensor's part in the layer.
        what: &'static str,
        /// Its type.
        found: DType,
        /// The types that may be there.
        expected: &'static str,
    },
    /// 8-bit matrices without as many vectors of scales.
    #[error("{matrices} matrices of i8 come with {scales} vectors of scales")]
    Scales {
        /// How many matrices there are.
        matrices: usize,
        /// How many vectors of scales there are.
        scales: usize,
    },
    /// An 8-bit matrix so wide that sums of products may not fit 32 bits.
    #[error("an i8 weight has {cols} columns, expected at most {MOST_COLUMNS}")]
    TooWide {
        /// Its columns.
        cols: usize,
    },
    /// Integers that are to be multiplied as 8-bit floats.
    #[error("a weight of i8 can't be multiplied in 8-bit floats")]
    IntegersInFp8,
    /// Matrices of different element types.
    #[error("the weights of one linear layer must have one dtype, found {first} and {second}")]
    DTypes {
        /// The first matrix's type.
        first: DType,
        /// The type that differs.
        second: DType,
    },
    /// An update that reaches past the layer's last row.
    #[error("a delta changes rows {start}..{end} of a linear layer with {rows}")]
    DeltaRows {
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// Rows of the layer.
        rows: usize,
    },
}

use crate::int8::MAX_COLS;
use crate::{DType, Shape};

/// Tensors that don't form a linear layer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum LinearError {
    /// The layer has no weight.
    #[error("a linear layer needs at least one weight")]
    NoWeight,
    /// The weight has no elements.
    #[error("a weight has shape [{rows}, {cols}], expected at least one element")]
    Empty { rows: usize, cols: usize },
    /// A weight or LoRA factor that is not a matrix.
    #[error("{what} has shape {found}, expected a matrix")]
    NotAMatrix { what: &'static str, found: Shape },
    /// A tensor whose shape does not fit the others.
    #[error("{what} has shape {found}, expected {expected}")]
    Shape { what: &'static str, found: Shape, expected: Shape },
    /// A tensor of an element type that is not allowed there.
    #[error("{what} is {found}, expected {expected}")]
    DType { what: &'static str, found: DType, expected: &'static str },
    /// Different numbers of int8 matrices and scale vectors.
    #[error("{matrices} int8 matrices need as many scale vectors, found {scales}")]
    Scales { matrices: usize, scales: usize },
    /// An int8 matrix so wide that a dot product may overflow 32 bits.
    #[error("an int8 weight has {cols} columns, expected at most {MAX_COLS}")]
    TooWide { cols: usize },
    /// A rotation whose groups don't divide the weight's width.
    #[error("an int8 weight has {cols} columns, expected whole groups of {group} to rotate")]
    Rotation { cols: usize, group: usize },
    /// An fp8 matmul requested for an int8 weight.
    #[error("an int8 weight can't use an fp8 matmul")]
    Int8WithFp8Matmul,
    /// An nvfp4 matmul requested for a weight of another format.
    #[error("an nvfp4 matmul needs a weight packed as nvfp4")]
    NotNvfp4,
    /// Matrices of different element types.
    #[error("the weights of one linear layer must have one dtype, found {first} and {second}")]
    DTypes { first: DType, second: DType },
    /// A LoRA delta that reaches past the layer's last row.
    #[error("a LoRA delta changes rows {start}..{end} of a linear layer with {rows} rows")]
    DeltaRows { start: usize, end: usize, rows: usize },
}

//! What a linear layer is made of, checked once for every backend.

mod error;

use crate::int8::MOST_COLUMNS;
use crate::packed::Packed;
use crate::{DType, HostTensor, Shape};
pub use error::LinearError;

/// Everything that makes up one linear layer, before a backend takes it: `y = x · weightᵀ + bias`, plus the
/// low-rank updates of LoRAs.
///
/// The weight may come in several matrices (the q, k and v of one input), stacked by rows; keeping them apart lets
/// each stay where it lies in its mapped file.
///
/// Every constructor checks the whole: matrices of one width and type with at least one element, scales, bias and updates
/// that fit them. So a backend may take the parts as they are.
///
/// ```
/// use kiln_tensor::{Delta, HostTensor, LinearParts};
///
/// let (q, k) = (HostTensor::zeros([4, 3]), HostTensor::zeros([2, 3]));
/// let update = Delta { row: 4, down: HostTensor::zeros([1, 3]), up: HostTensor::zeros([2, 1]), scale: 0.5 };
/// let parts = LinearParts::dense(vec![q, k])?.with_bias(HostTensor::zeros([6]))?.with_deltas(vec![update])?;
/// assert_eq!((parts.rows(), parts.cols()), (6, 3));
/// # Ok::<(), kiln_tensor::LinearError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LinearParts {
    matrix: LinearMatrix,
    fp8: bool,
    bias: Option<HostTensor>,
    deltas: Vec<Delta>,
}

/// The weight of a linear layer: `[rows_i, cols]` each, stacked by rows.
#[derive(Clone, Debug, PartialEq)]
pub enum LinearMatrix {
    /// The values themselves, of one type: f32, bf16, f16 or f64.
    Dense(Vec<HostTensor>),
    /// Integers with a scale for each row, `weight = integer · scale`, for a product in integers as `kiln-ops` defines it.
    Int8 {
        /// The integers, of i8.
        rows: Vec<HostTensor>,
        /// Their scales, `[rows_i]` each, of a float type.
        scales: Vec<HostTensor>,
    },
    /// The values that [`Packed::read`] gives; each matrix may have a format of its own.
    Packed(Vec<Packed>),
}

/// A low-rank update of some output rows: `y[.., row..row + up.rows] += scale * (x · downᵀ) · upᵀ`.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    /// The first output row it changes.
    pub row: usize,
    /// `[rank, cols]`.
    pub down: HostTensor,
    /// `[rows, rank]`, for `rows` output rows from `row` on.
    pub up: HostTensor,
    /// Factor of the update.
    pub scale: f32,
}

impl LinearParts {
    /// A layer whose weight is these matrices of one float type.
    pub fn dense(matrices: Vec<HostTensor>) -> Result<Self, LinearError> {
        LinearParts::of(LinearMatrix::Dense(matrices))
    }

    /// A layer whose weight is these matrices of i8, each with a vector of scales.
    pub fn int8(rows: Vec<HostTensor>, scales: Vec<HostTensor>) -> Result<Self, LinearError> {
        LinearParts::of(LinearMatrix::Int8 { rows, scales })
    }

    /// A layer whose weight is these packed matrices.
    pub fn packed(matrices: Vec<Packed>) -> Result<Self, LinearError> {
        LinearParts::of(LinearMatrix::Packed(matrices))
    }

    fn of(matrix: LinearMatrix) -> Result<Self, LinearError> {
        LinearParts { matrix, fp8: false, bias: None, deltas: Vec::new() }.checked()
    }

    /// The same layer with this bias, `[rows]` of a float type, or none.
    pub fn with_bias(self, bias: impl Into<Option<HostTensor>>) -> Result<Self, LinearError> {
        LinearParts { bias: bias.into(), ..self }.checked()
    }

    /// The same layer with these updates instead of its own.
    pub fn with_deltas(self, deltas: Vec<Delta>) -> Result<Self, LinearError> {
        LinearParts { deltas, ..self }.checked()
    }

    /// The same layer with its product in 8-bit floats, as `kiln-ops` defines it. Integers have no such product.
    pub fn in_fp8(self) -> Result<Self, LinearError> {
        LinearParts { fp8: true, ..self }.checked()
    }

    /// The one check that all constructors go through.
    fn checked(self) -> Result<Self, LinearError> {
        let size = self.matrix.check()?;
        if self.fp8 && matches!(self.matrix, LinearMatrix::Int8 { .. }) {
            return Err(LinearError::IntegersInFp8);
        }
        if let Some(bias) = &self.bias {
            float("bias", bias)?;
            if bias.shape().dims() != [size[0]] {
                return Err(wrong("bias", bias.shape(), [size[0]]));
            }
        }
        self.deltas.iter().try_for_each(|delta| delta.check(size))?;
        Ok(self)
    }

    /// The weight.
    pub fn matrix(&self) -> &LinearMatrix {
        &self.matrix
    }

    /// Whether the product is to be made in 8-bit floats.
    pub fn fp8(&self) -> bool {
        self.fp8
    }

    /// `[rows]`, added to every output.
    pub fn bias(&self) -> Option<&HostTensor> {
        self.bias.as_ref()
    }

    /// Updates of some of the output rows.
    pub fn deltas(&self) -> &[Delta] {
        &self.deltas
    }

    /// Bytes of the weight in the form that it is multiplied in: one for each value where that is 8-bit floats, otherwise as it is
    /// stored; a weight that is changed where it is read counts in full.
    pub fn bytes(&self) -> u64 {
        let values = (self.rows() * self.cols()) as u64;
        let sizes = |tensors: &[HostTensor]| tensors.iter().map(|tensor| tensor.bytes().len() as u64).sum();
        match &self.matrix {
            _ if self.fp8 => values,
            // Nothing multiplies in f64.
            LinearMatrix::Dense(tensors) if tensors.iter().any(|t| t.dtype() == DType::F64) => 4 * values,
            LinearMatrix::Dense(tensors) | LinearMatrix::Int8 { rows: tensors, .. } => sizes(tensors),
            LinearMatrix::Packed(matrices) if matrices.iter().any(Packed::is_changed) => {
                let f32 = matrices.iter().any(|matrix| matrix.dense_dtype() == DType::F32);
                values * if f32 { 4 } else { 2 }
            }
            LinearMatrix::Packed(matrices) => matrices.iter().map(|matrix| matrix.bytes().len() as u64).sum(),
        }
    }

    /// Output width: the rows of all matrices together.
    pub fn rows(&self) -> usize {
        self.matrix.shapes().map(Shape::rows).sum()
    }

    /// Input width.
    pub fn cols(&self) -> usize {
        self.matrix.shapes().next().map_or(0, Shape::last)
    }
}

impl LinearMatrix {
    /// `[rows_i, cols]` of every matrix.
    pub fn shapes(&self) -> impl Iterator<Item = &Shape> {
        let (dense, packed) = match self {
            LinearMatrix::Dense(tensors) | LinearMatrix::Int8 { rows: tensors, .. } => {
                (&tensors[..], &[][..])
            }
            LinearMatrix::Packed(matrices) => (&[][..], &matrices[..]),
        };
        dense.iter().map(HostTensor::shape).chain(packed.iter().map(Packed::shape))
    }

    /// Rows and columns, if all fits together.
    fn check(&self) -> Result<[usize; 2], LinearError> {
        let [_, cols] = matrix("weight", self.shapes().next().ok_or(LinearError::NoWeight)?)?;
        let mut rows = 0usize;
        for shape in self.shapes() {
            let [height, width] = matrix("weight", shape)?;
            if width != cols {
                return Err(wrong("weight", shape, [height, cols]));
            }
            rows = rows.saturating_add(height);
        }
        if rows == 0 || cols == 0 {
            return Err(LinearError::Empty { rows, cols });
        }
        match self {
            LinearMatrix::Dense(matrices) => {
                matrices.iter().try_for_each(|dense| float("weight", dense))?;
                let first = matrices[0].dtype();
                if let Some(other) = matrices.iter().find(|other| other.dtype() != first) {
                    return Err(LinearError::DTypes { first, second: other.dtype() });
                }
            }
            LinearMatrix::Int8 { rows, scales } => {
                if rows.len() != scales.len() {
                    return Err(LinearError::Scales { matrices: rows.len(), scales: scales.len() });
                }
                if cols > MOST_COLUMNS {
                    return Err(LinearError::TooWide { cols });
                }
                rows.iter().zip(scales).try_for_each(|(rows, scales)| integers(rows, scales))?;
            }
            LinearMatrix::Packed(_) => {}
        }
        Ok([rows, cols])
    }
}

impl Delta {
    /// The width between the two matrices.
    pub fn rank(&self) -> usize {
        self.up.shape().last()
    }

    /// How many output rows it changes.
    pub fn rows(&self) -> usize {
        self.up.shape().rows()
    }

    /// Refuses an update that doesn't fit a layer of `[rows, cols]`.
    pub fn check(&self, [rows, cols]: [usize; 2]) -> Result<(), LinearError> {
        let [rank, width] = matrix("delta down", self.down.shape())?;
        if width != cols {
            return Err(wrong("delta down", self.down.shape(), [rank, cols]));
        }
        let [height, inner] = matrix("delta up", self.up.shape())?;
        if inner != rank {
            return Err(wrong("delta up", self.up.shape(), [height, rank]));
        }
        let end = self.row.saturating_add(height);
        if end > rows {
            return Err(LinearError::DeltaRows { start: self.row, end, rows });
        }
        float("delta down", &self.down)?;
        float("delta up", &self.up)
    }
}

fn matrix(what: &'static str, shape: &Shape) -> Result<[usize; 2], LinearError> {
    let not_one = |_| LinearError::NotAMatrix { what, found: shape.clone() };
    shape.dims().try_into().map_err(not_one)
}

fn wrong<const N: usize>(what: &'static str, found: &Shape, expected: [usize; N]) -> LinearError {
    LinearError::Shape { what, found: found.clone(), expected: expected.into() }
}

fn float(what: &'static str, tensor: &HostTensor) -> Result<(), LinearError> {
    match tensor.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(()),
        found => Err(LinearError::DType { what, found, expected: "f32, bf16, f16 or f64" }),
    }
}

/// Integers and their scales.
fn integers(rows: &HostTensor, scales: &HostTensor) -> Result<(), LinearError> {
    if rows.dtype() != DType::I8 {
        return Err(LinearError::DType { what: "weight", found: rows.dtype(), expected: "i8" });
    }
    if scales.shape().dims() != [rows.shape().rows()] {
        return Err(wrong("scale", scales.shape(), [rows.shape().rows()]));
    }
    float("scale", scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::Format;

    fn zeros<const N: usize>(shape: [usize; N]) -> HostTensor {
        HostTensor::zeros(shape)
    }

    fn int8(rows: usize, cols: usize) -> HostTensor {
        HostTensor::new(DType::I8, [rows, cols], vec![1; rows * cols].into()).unwrap()
    }

    fn i32s<const N: usize>(shape: [usize; N]) -> HostTensor {
        HostTensor::new(DType::I32, shape, vec![0; 4 * shape.iter().product::<usize>()].into()).unwrap()
    }

    fn delta(row: usize, down: &[usize], up: &[usize]) -> Delta {
        Delta { row, down: HostTensor::zeros(down), up: HostTensor::zeros(up), scale: 1.0 }
    }

    fn refused(parts: Result<LinearParts, LinearError>) -> String {
        parts.unwrap_err().to_string()
    }

    #[test]
    fn matrices_stack_by_rows() {
        let parts = LinearParts::dense(vec![zeros([4, 3]), zeros([2, 3])]).unwrap();
        let parts = parts.with_bias(zeros([6])).unwrap();
        assert_eq!((parts.rows(), parts.cols(), parts.fp8()), (6, 3, false));
        assert!(parts.in_fp8().unwrap().fp8());
    }

    #[test]
    fn matrices_must_be_of_one_width_and_dtype() {
        let refused = |matrices| refused(LinearParts::dense(matrices));
        assert_eq!(refused(vec![]), "a linear layer needs at least one weight");
        assert_eq!(refused(vec![zeros([6])]), "weight has shape [6], expected a matrix");
        assert_eq!(refused(vec![zeros([4, 3]), zeros([4, 2])]), "weight has shape [4, 2], expected [4, 3]");
        let half = zeros([1, 3]).to_dtype(DType::BF16).unwrap();
        assert_eq!(
            refused(vec![zeros([4, 3]), half]),
            "the weights of one linear layer must have one dtype, found f32 and bf16"
        );
        for [rows, cols] in [[0, 4], [4, 0]] {
            assert_eq!(
                refused(vec![zeros([rows, cols])]),
                format!("a weight has shape [{rows}, {cols}], expected at least one element")
            );
        }
    }

    #[test]
    fn a_dense_weight_is_of_floats() {
        let refused = |matrix| refused(LinearParts::dense(vec![matrix]));
        assert_eq!(refused(int8(4, 3)), "weight is i8, expected f32, bf16, f16 or f64");
        assert_eq!(refused(i32s([4, 3])), "weight is i32, expected f32, bf16, f16 or f64");
    }

    #[test]
    fn packed_matrices_must_have_one_width() {
        let packed = |cols: usize| Packed::new(Format::BF16, [2, cols], vec![0; 4 * cols].into()).unwrap();
        assert_eq!(LinearParts::packed(vec![packed(3), packed(3)]).unwrap().rows(), 4);
        assert_eq!(
            refused(LinearParts::packed(vec![packed(3), packed(4)])),
            "weight has shape [2, 4], expected [2, 3]"
        );
        assert_eq!(refused(LinearParts::packed(vec![])), "a linear layer needs at least one weight");
    }

    #[test]
    fn integers_come_with_a_scale_for_each_row() {
        let refused = |rows, scales| refused(LinearParts::int8(rows, scales));
        let (four, two) = (int8(4, 3), int8(2, 3));
        let parts = LinearParts::int8(vec![four.clone(), two.clone()], vec![zeros([4]), zeros([2])]).unwrap();
        assert_eq!((parts.rows(), parts.cols()), (6, 3));
        assert_eq!(refused(vec![four.clone()], vec![]), "1 matrices of i8 come with 0 vectors of scales");
        assert_eq!(
            refused(vec![four.clone(), two], vec![zeros([4])]),
            "2 matrices of i8 come with 1 vectors of scales"
        );
        assert_eq!(refused(vec![four.clone()], vec![zeros([3])]), "scale has shape [3], expected [4]");
        assert_eq!(refused(vec![four], vec![i32s([4])]), "scale is i32, expected f32, bf16, f16 or f64");
        assert_eq!(refused(vec![zeros([4, 3])], vec![zeros([4])]), "weight is f32, expected i8");
        assert_eq!(
            refused(vec![int8(1, MOST_COLUMNS + 1)], vec![zeros([1])]),
            "an i8 weight has 131073 columns, expected at most 131072"
        );
        assert_eq!(parts.in_fp8().unwrap_err(), LinearError::IntegersInFp8);
    }

    #[test]
    fn a_bias_has_an_element_for_each_row() {
        let parts = LinearParts::dense(vec![zeros([4, 3])]).unwrap();
        assert_eq!(refused(parts.clone().with_bias(zeros([3]))), "bias has shape [3], expected [4]");
        assert_eq!(
            refused(parts.clone().with_bias(i32s([4]))),
            "bias is i32, expected f32, bf16, f16 or f64"
        );
        assert_eq!(parts.clone().with_bias(None).unwrap(), parts);
    }

    #[test]
    fn deltas_must_fit_the_layer() {
        let parts = LinearParts::dense(vec![zeros([4, 3]), zeros([2, 3])]).unwrap();
        let updated = parts.clone().with_deltas(vec![delta(4, &[5, 3], &[2, 5])]).unwrap();
        assert_eq!((updated.deltas()[0].rank(), updated.deltas()[0].rows()), (5, 2));
        let refused = |delta| refused(parts.clone().with_deltas(vec![delta]));
        assert_eq!(refused(delta(0, &[5, 4], &[4, 5])), "delta down has shape [5, 4], expected [5, 3]");
        assert_eq!(refused(delta(0, &[5, 3], &[4, 6])), "delta up has shape [4, 6], expected [4, 5]");
        assert_eq!(refused(delta(0, &[3], &[4, 5])), "delta down has shape [3], expected a matrix");
        assert_eq!(refused(delta(5, &[5, 3], &[2, 5])), "a delta changes rows 5..7 of a linear layer with 6");
        let past_every_end = delta(usize::MAX, &[5, 3], &[2, 5]);
        assert!(refused(past_every_end).ends_with("of a linear layer with 6"));
        let whole = Delta { up: i32s([4, 5]), ..delta(0, &[5, 3], &[4, 5]) };
        assert_eq!(refused(whole), "delta up is i32, expected f32, bf16, f16 or f64");
    }
}

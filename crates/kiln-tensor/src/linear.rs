//! A linear layer in host memory, validated once for all backends.
//!
//! int8 is a form of the weight; an fp8 matmul is only requested for a dense or packed weight, and the backend quantizes its
//! rows when it loads it. An nvfp4 matmul is requested for weights that are stored as nvfp4.

mod error;

use crate::int8::MAX_COLS;
use crate::packed::PackedTensor;
use crate::{DType, HostTensor, Rotation, Shape};
pub use error::LinearError;

/// A linear layer in host memory, before a backend loads it: `y = x · weightᵀ + bias`, plus LoRA deltas.
///
/// The weight may consist of several matrices, stacked by rows (such as q, k and v of one input). They are kept apart so
/// that each stays a view of its memory-mapped file.
///
/// Every constructor validates the whole layer (widths, element types, scales, bias, deltas), so backends need not.
///
/// ```
/// use kiln_tensor::{LoraDelta, HostTensor, HostLinear};
///
/// let (q, k) = (HostTensor::zeros([4, 3]), HostTensor::zeros([2, 3]));
/// let delta = LoraDelta { row: 4, down: HostTensor::zeros([1, 3]), up: HostTensor::zeros([2, 1]), scale: 0.5 };
/// let linear = HostLinear::dense(vec![q, k])?.with_bias(HostTensor::zeros([6]))?.with_deltas(vec![delta])?;
/// assert_eq!((linear.rows(), linear.cols()), (6, 3));
/// # Ok::<(), kiln_tensor::LinearError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct HostLinear {
    weight: LinearWeight,
    matmul: Matmul,
    bias: Option<HostTensor>,
    deltas: Vec<LoraDelta>,
}

/// The type in which both operands are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Matmul {
    /// That of the activations, or int8 for such a weight.
    Own,
    Fp8,
    Nvfp4,
}

/// The weight of a linear layer: `[rows_i, cols]` each, stacked by rows.
#[derive(Clone, Debug, PartialEq)]
pub enum LinearWeight {
    /// Dense values of one type: f32, bf16, f16 or f64.
    Dense(Vec<HostTensor>),
    /// Integers with a scale per row, `weight = integer · scale`, rotated back, for an int8 matmul as `kiln-ops` defines it.
    Int8 {
        /// The integers, i8.
        rows: Vec<HostTensor>,
        /// Their scales, `[rows_i]` each, a float type.
        scales: Vec<HostTensor>,
        /// How the rows are rotated, and have to be rotated back to get the weight.
        rotation: Rotation,
    },
    /// Packed values ([`PackedTensor::read`]); each matrix may have its own format.
    Packed(Vec<PackedTensor>),
}

/// A LoRA's low-rank update of some output rows: `y[.., row..row + up.rows] += scale * (x · downᵀ) · upᵀ`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraDelta {
    /// The first output row it changes.
    pub row: usize,
    /// `[rank, cols]`.
    pub down: HostTensor,
    /// `[rows, rank]`, for `rows` output rows from `row` on.
    pub up: HostTensor,
    /// Factor of the update.
    pub scale: f32,
}

impl HostLinear {
    /// Creates a layer from dense matrices of one float type.
    pub fn dense(matrices: Vec<HostTensor>) -> Result<Self, LinearError> {
        HostLinear::new(LinearWeight::Dense(matrices))
    }

    /// Creates a layer from int8 matrices, each with a vector of row scales, whose rows are rotated.
    pub fn int8(
        rows: Vec<HostTensor>,
        scales: Vec<HostTensor>,
        rotation: Rotation,
    ) -> Result<Self, LinearError> {
        HostLinear::new(LinearWeight::Int8 { rows, scales, rotation })
    }

    /// Creates a layer from packed matrices.
    pub fn packed(matrices: Vec<PackedTensor>) -> Result<Self, LinearError> {
        HostLinear::new(LinearWeight::Packed(matrices))
    }

    fn new(weight: LinearWeight) -> Result<Self, LinearError> {
        HostLinear { weight, matmul: Matmul::Own, bias: None, deltas: Vec::new() }.validated()
    }

    /// Replaces the bias: `[rows]` of a float type, or none.
    pub fn with_bias(self, bias: impl Into<Option<HostTensor>>) -> Result<Self, LinearError> {
        HostLinear { bias: bias.into(), ..self }.validated()
    }

    /// Replaces the LoRA deltas.
    pub fn with_deltas(self, deltas: Vec<LoraDelta>) -> Result<Self, LinearError> {
        HostLinear { deltas, ..self }.validated()
    }

    /// Requests an fp8 matmul, as `kiln-ops` defines it. Not available for int8 weights.
    pub fn with_fp8_matmul(self) -> Result<Self, LinearError> {
        HostLinear { matmul: Matmul::Fp8, ..self }.validated()
    }

    /// Requests an nvfp4 matmul, as `kiln-ops` defines it. Only for matrices [that are nvfp4](PackedTensor::is_nvfp4).
    pub fn with_nvfp4_matmul(self) -> Result<Self, LinearError> {
        HostLinear { matmul: Matmul::Nvfp4, ..self }.validated()
    }

    fn validated(self) -> Result<Self, LinearError> {
        let size = self.weight.check()?;
        match (self.matmul, &self.weight) {
            (Matmul::Fp8, LinearWeight::Int8 { .. }) => return Err(LinearError::Int8WithFp8Matmul),
            (Matmul::Nvfp4, LinearWeight::Packed(matrices))
                if matrices.iter().all(PackedTensor::is_nvfp4) => {}
            (Matmul::Nvfp4, _) => return Err(LinearError::NotNvfp4),
            _ => {}
        }
        if let Some(bias) = &self.bias {
            check_float("bias", bias)?;
            if bias.shape().dims() != [size[0]] {
                return Err(shape_error("bias", bias.shape(), [size[0]]));
            }
        }
        self.deltas.iter().try_for_each(|delta| delta.check(size))?;
        Ok(self)
    }

    /// The weight.
    pub fn weight(&self) -> &LinearWeight {
        &self.weight
    }

    /// Whether the matmul is done in fp8.
    pub fn fp8_matmul(&self) -> bool {
        self.matmul == Matmul::Fp8
    }

    /// Whether the matmul is done in nvfp4.
    pub fn nvfp4_matmul(&self) -> bool {
        self.matmul == Matmul::Nvfp4
    }

    /// `[rows]`, added to every output.
    pub fn bias(&self) -> Option<&HostTensor> {
        self.bias.as_ref()
    }

    /// The LoRA deltas.
    pub fn deltas(&self) -> &[LoraDelta] {
        &self.deltas
    }

    /// Bytes of the weight in the form it is multiplied in: one per value for an fp8 matmul, the stored bytes otherwise. A
    /// patched packed weight counts with its dense size.
    pub fn bytes(&self) -> u64 {
        let values = (self.rows() * self.cols()) as u64;
        let sizes = |tensors: &[HostTensor]| tensors.iter().map(|tensor| tensor.bytes().len() as u64).sum();
        match &self.weight {
            _ if self.fp8_matmul() => values,
            // f64 is multiplied as f32.
            LinearWeight::Dense(tensors) if tensors.iter().any(|t| t.dtype() == DType::F64) => 4 * values,
            LinearWeight::Dense(tensors) | LinearWeight::Int8 { rows: tensors, .. } => sizes(tensors),
            LinearWeight::Packed(matrices) if matrices.iter().any(PackedTensor::is_patched) => {
                let f32 = matrices.iter().any(|matrix| matrix.dense_dtype() == DType::F32);
                values * if f32 { 4 } else { 2 }
            }
            LinearWeight::Packed(matrices) => matrices.iter().map(|matrix| matrix.bytes().len() as u64).sum(),
        }
    }

    /// Output width: the total rows of all matrices.
    pub fn rows(&self) -> usize {
        self.weight.shapes().map(Shape::rows).sum()
    }

    /// Input width.
    pub fn cols(&self) -> usize {
        self.weight.shapes().next().map_or(0, Shape::last)
    }
}

impl LinearWeight {
    /// `[rows_i, cols]` of every matrix.
    pub fn shapes(&self) -> impl Iterator<Item = &Shape> {
        let (dense, packed) = match self {
            LinearWeight::Dense(tensors) | LinearWeight::Int8 { rows: tensors, .. } => {
                (&tensors[..], &[][..])
            }
            LinearWeight::Packed(matrices) => (&[][..], &matrices[..]),
        };
        dense.iter().map(HostTensor::shape).chain(packed.iter().map(PackedTensor::shape))
    }

    /// Validates the matrices; returns total rows and columns.
    fn check(&self) -> Result<[usize; 2], LinearError> {
        let [_, cols] = matrix_dims("weight", self.shapes().next().ok_or(LinearError::NoWeight)?)?;
        let mut rows = 0usize;
        for shape in self.shapes() {
            let [height, width] = matrix_dims("weight", shape)?;
            if width != cols {
                return Err(shape_error("weight", shape, [height, cols]));
            }
            rows = rows.saturating_add(height);
        }
        if rows == 0 || cols == 0 {
            return Err(LinearError::Empty { rows, cols });
        }
        match self {
            LinearWeight::Dense(matrices) => {
                matrices.iter().try_for_each(|dense| check_float("weight", dense))?;
                let first = matrices[0].dtype();
                if let Some(other) = matrices.iter().find(|other| other.dtype() != first) {
                    return Err(LinearError::DTypes { first, second: other.dtype() });
                }
            }
            LinearWeight::Int8 { rows, scales, rotation } => {
                if !rotation.fits(cols) {
                    return Err(LinearError::Rotation { cols, group: rotation.group() });
                }
                if rows.len() != scales.len() {
                    return Err(LinearError::Scales { matrices: rows.len(), scales: scales.len() });
                }
                if cols > MAX_COLS {
                    return Err(LinearError::TooWide { cols });
                }
                rows.iter().zip(scales).try_for_each(|(rows, scales)| check_int8(rows, scales))?;
            }
            LinearWeight::Packed(_) => {}
        }
        Ok([rows, cols])
    }
}

impl LoraDelta {
    /// The LoRA rank.
    pub fn rank(&self) -> usize {
        self.up.shape().last()
    }

    /// Number of output rows it changes.
    pub fn rows(&self) -> usize {
        self.up.shape().rows()
    }

    /// Checks that the delta fits a layer of shape `[rows, cols]`.
    pub fn check(&self, [rows, cols]: [usize; 2]) -> Result<(), LinearError> {
        let [rank, width] = matrix_dims("delta down", self.down.shape())?;
        if width != cols {
            return Err(shape_error("delta down", self.down.shape(), [rank, cols]));
        }
        let [height, inner] = matrix_dims("delta up", self.up.shape())?;
        if inner != rank {
            return Err(shape_error("delta up", self.up.shape(), [height, rank]));
        }
        let end = self.row.saturating_add(height);
        if end > rows {
            return Err(LinearError::DeltaRows { start: self.row, end, rows });
        }
        check_float("delta down", &self.down)?;
        check_float("delta up", &self.up)
    }
}

fn matrix_dims(what: &'static str, shape: &Shape) -> Result<[usize; 2], LinearError> {
    let error = |_| LinearError::NotAMatrix { what, found: shape.clone() };
    shape.dims().try_into().map_err(error)
}

fn shape_error<const N: usize>(what: &'static str, found: &Shape, expected: [usize; N]) -> LinearError {
    LinearError::Shape { what, found: found.clone(), expected: expected.into() }
}

fn check_float(what: &'static str, tensor: &HostTensor) -> Result<(), LinearError> {
    match tensor.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(()),
        found => Err(LinearError::DType { what, found, expected: "f32, bf16, f16 or f64" }),
    }
}

/// Checks one int8 matrix and its row scales.
fn check_int8(rows: &HostTensor, scales: &HostTensor) -> Result<(), LinearError> {
    if rows.dtype() != DType::I8 {
        return Err(LinearError::DType { what: "weight", found: rows.dtype(), expected: "i8" });
    }
    if scales.shape().dims() != [rows.shape().rows()] {
        return Err(shape_error("scale", scales.shape(), [rows.shape().rows()]));
    }
    check_float("scale", scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::{BlockScales, Format};

    fn zeros<const N: usize>(shape: [usize; N]) -> HostTensor {
        HostTensor::zeros(shape)
    }

    fn int8(rows: usize, cols: usize) -> HostTensor {
        HostTensor::new(DType::I8, [rows, cols], vec![1; rows * cols].into()).unwrap()
    }

    fn i32s<const N: usize>(shape: [usize; N]) -> HostTensor {
        HostTensor::new(DType::I32, shape, vec![0; 4 * shape.iter().product::<usize>()].into()).unwrap()
    }

    fn delta(row: usize, down: &[usize], up: &[usize]) -> LoraDelta {
        LoraDelta { row, down: HostTensor::zeros(down), up: HostTensor::zeros(up), scale: 1.0 }
    }

    fn error_of(result: Result<HostLinear, LinearError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn matrices_stack_by_rows() {
        let linear = HostLinear::dense(vec![zeros([4, 3]), zeros([2, 3])]).unwrap();
        let linear = linear.with_bias(zeros([6])).unwrap();
        assert_eq!((linear.rows(), linear.cols(), linear.fp8_matmul()), (6, 3, false));
        assert!(linear.with_fp8_matmul().unwrap().fp8_matmul());
    }

    #[test]
    fn matrices_must_share_width_and_dtype() {
        let error_of = |matrices| error_of(HostLinear::dense(matrices));
        assert_eq!(error_of(vec![]), "a linear layer needs at least one weight");
        assert_eq!(error_of(vec![zeros([6])]), "weight has shape [6], expected a matrix");
        assert_eq!(error_of(vec![zeros([4, 3]), zeros([4, 2])]), "weight has shape [4, 2], expected [4, 3]");
        let half = zeros([1, 3]).to_dtype(DType::BF16).unwrap();
        assert_eq!(
            error_of(vec![zeros([4, 3]), half]),
            "the weights of one linear layer must have one dtype, found f32 and bf16"
        );
        for [rows, cols] in [[0, 4], [4, 0]] {
            assert_eq!(
                error_of(vec![zeros([rows, cols])]),
                format!("a weight has shape [{rows}, {cols}], expected at least one element")
            );
        }
    }

    #[test]
    fn dense_weights_must_be_floats() {
        let error_of = |matrix| error_of(HostLinear::dense(vec![matrix]));
        assert_eq!(error_of(int8(4, 3)), "weight is i8, expected f32, bf16, f16 or f64");
        assert_eq!(error_of(i32s([4, 3])), "weight is i32, expected f32, bf16, f16 or f64");
    }

    #[test]
    fn packed_matrices_must_share_a_width() {
        let packed =
            |cols: usize| PackedTensor::new(Format::BF16, [2, cols], vec![0; 4 * cols].into()).unwrap();
        assert_eq!(HostLinear::packed(vec![packed(3), packed(3)]).unwrap().rows(), 4);
        assert_eq!(
            error_of(HostLinear::packed(vec![packed(3), packed(4)])),
            "weight has shape [2, 4], expected [2, 3]"
        );
        assert_eq!(error_of(HostLinear::packed(vec![])), "a linear layer needs at least one weight");
    }

    #[test]
    fn nvfp4_matmuls_need_nvfp4_matrices_without_negative_scales() {
        let packed = |scale: u8| {
            let scales =
                BlockScales { scales: vec![scale; 2].into(), swizzled: false, high_first: true, global: 1.0 };
            let values = PackedTensor::new(Format::NvFp4, [2, 16], vec![0; 16].into()).unwrap();
            values.with_block_scales(scales).unwrap()
        };
        let linear =
            HostLinear::packed(vec![packed(0x38), packed(0x7e)]).unwrap().with_nvfp4_matmul().unwrap();
        assert!(linear.nvfp4_matmul() && !linear.fp8_matmul() && linear.bytes() == 32);
        for other in [
            HostLinear::packed(vec![packed(0x38), packed(0xb8)]),
            HostLinear::packed(vec![PackedTensor::from_dense(&zeros([2, 16])).unwrap()]),
            HostLinear::dense(vec![zeros([2, 16])]),
        ] {
            assert_eq!(other.unwrap().with_nvfp4_matmul().unwrap_err(), LinearError::NotNvfp4);
        }
    }

    #[test]
    fn int8_matrices_need_a_scale_per_row() {
        let error_of = |rows, scales| error_of(HostLinear::int8(rows, scales, Rotation::None));
        let (four, two) = (int8(4, 3), int8(2, 3));
        let (rows, scales) = (vec![four.clone(), two.clone()], vec![zeros([4]), zeros([2])]);
        let linear = HostLinear::int8(rows.clone(), scales.clone(), Rotation::None).unwrap();
        assert_eq!((linear.rows(), linear.cols()), (6, 3));
        assert_eq!(
            error_of(vec![four.clone()], vec![]),
            "1 int8 matrices need as many scale vectors, found 0"
        );
        assert_eq!(
            error_of(vec![four.clone(), two], vec![zeros([4])]),
            "2 int8 matrices need as many scale vectors, found 1"
        );
        assert_eq!(error_of(vec![four.clone()], vec![zeros([3])]), "scale has shape [3], expected [4]");
        assert_eq!(error_of(vec![four], vec![i32s([4])]), "scale is i32, expected f32, bf16, f16 or f64");
        assert_eq!(error_of(vec![zeros([4, 3])], vec![zeros([4])]), "weight is f32, expected i8");
        assert_eq!(
            error_of(vec![int8(1, MAX_COLS + 1)], vec![zeros([1])]),
            "an int8 weight has 131073 columns, expected at most 131072"
        );
        assert_eq!(
            HostLinear::int8(rows, scales, Rotation::By16).unwrap_err(),
            LinearError::Rotation { cols: 3, group: 16 }
        );
        assert_eq!(linear.with_fp8_matmul().unwrap_err(), LinearError::Int8WithFp8Matmul);
    }

    #[test]
    fn a_bias_has_one_element_per_row() {
        let linear = HostLinear::dense(vec![zeros([4, 3])]).unwrap();
        assert_eq!(error_of(linear.clone().with_bias(zeros([3]))), "bias has shape [3], expected [4]");
        assert_eq!(
            error_of(linear.clone().with_bias(i32s([4]))),
            "bias is i32, expected f32, bf16, f16 or f64"
        );
        assert_eq!(linear.clone().with_bias(None).unwrap(), linear);
    }

    #[test]
    fn deltas_must_fit_the_layer() {
        let linear = HostLinear::dense(vec![zeros([4, 3]), zeros([2, 3])]).unwrap();
        let with_delta = linear.clone().with_deltas(vec![delta(4, &[5, 3], &[2, 5])]).unwrap();
        assert_eq!((with_delta.deltas()[0].rank(), with_delta.deltas()[0].rows()), (5, 2));
        let error_of = |delta| error_of(linear.clone().with_deltas(vec![delta]));
        assert_eq!(error_of(delta(0, &[5, 4], &[4, 5])), "delta down has shape [5, 4], expected [5, 3]");
        assert_eq!(error_of(delta(0, &[5, 3], &[4, 6])), "delta up has shape [4, 6], expected [4, 5]");
        assert_eq!(error_of(delta(0, &[3], &[4, 5])), "delta down has shape [3], expected a matrix");
        assert_eq!(
            error_of(delta(5, &[5, 3], &[2, 5])),
            "a LoRA delta changes rows 5..7 of a linear layer with 6 rows"
        );
        let past_the_end = delta(usize::MAX, &[5, 3], &[2, 5]);
        assert!(error_of(past_the_end).ends_with("of a linear layer with 6 rows"));
        let integers = LoraDelta { up: i32s([4, 5]), ..delta(0, &[5, 3], &[4, 5]) };
        assert_eq!(error_of(integers), "delta up is i32, expected f32, bf16, f16 or f64");
    }
}

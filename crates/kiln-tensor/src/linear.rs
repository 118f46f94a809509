use crate::packed::Packed;
use crate::{DType, HostTensor, Shape};

/// Everything that makes up one linear layer, before a backend takes it: `y = x · weightᵀ + bias`, plus the
/// low-rank updates of LoRAs.
///
/// The weight may come in several slabs (the q, k and v of one input), stacked by rows; keeping them apart lets
/// each stay where it lies in its mapped file.
///
/// Slabs of a float type are the weight itself. Slabs of i8 come with a scale a row, `weight = integer · scale`, and ask
/// for a product in integers, as `kiln-ops` defines it. Packed matrices take the place of slabs: they stand for the values
/// that [`Packed::read`] gives, and each may have a format of its own.
///
/// With `fp8`, slabs of a float type or packed matrices ask for a product in 8-bit floats, as `kiln-ops` defines it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinearParts {
    /// `[rows_i, cols]` each, of one dtype, stacked by rows.
    pub slabs: Vec<HostTensor>,
    /// The scales of i8 slabs, `[rows_i]` each, of a float type; empty for slabs of a float type.
    pub scales: Vec<HostTensor>,
    /// Instead of slabs: `[rows_i, cols]` each, stacked by rows.
    pub packed: Vec<Packed>,
    /// Whether the product is to be made in 8-bit floats.
    pub fp8: bool,
    /// `[rows]`, added to every output.
    pub bias: Option<HostTensor>,
    /// Updates of some of the output rows.
    pub deltas: Vec<Delta>,
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

/// Why some tensors don't make a linear layer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LinearError {
    /// No slab at all.
    #[error("a linear layer needs at least one weight")]
    NoSlab,
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
    /// 8-bit slabs without as many vectors of scales, or scales for slabs that are not 8-bit.
    #[error("{slabs} slabs of {dtype} come with {scales} vectors of scales")]
    Scales {
        /// How many slabs there are.
        slabs: usize,
        /// Their type.
        dtype: DType,
        /// How many vectors of scales there are.
        scales: usize,
    },
    /// Slabs of different element types.
    #[error("the slabs of one linear layer must have one dtype, found {first} and {second}")]
    DTypes {
        /// The first slab's type.
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

impl LinearParts {
    /// A layer of these slabs, checked to be matrices of one dtype and one width, with a bias that fits.
    pub fn new(slabs: Vec<HostTensor>, bias: Option<HostTensor>) -> Result<Self, LinearError> {
        LinearParts::scaled(slabs, Vec::new(), bias)
    }

    /// [`LinearParts::new`] with the scales that slabs of i8 need.
    pub fn scaled(
        slabs: Vec<HostTensor>,
        scales: Vec<HostTensor>,
        bias: Option<HostTensor>,
    ) -> Result<Self, LinearError> {
        let first = slabs.first().ok_or(LinearError::NoSlab)?;
        let (_, cols) = matrix("weight", first)?;
        for slab in &slabs {
            let (rows, found) = matrix("weight", slab)?;
            if found != cols {
                return Err(wrong("weight", slab, [rows, cols]));
            }
            if slab.dtype() != first.dtype() {
                return Err(LinearError::DTypes { first: first.dtype(), second: slab.dtype() });
            }
        }
        let expected = if first.dtype() == DType::I8 { slabs.len() } else { 0 };
        if scales.len() != expected {
            return Err(LinearError::Scales {
                slabs: slabs.len(),
                dtype: first.dtype(),
                scales: scales.len(),
            });
        }
        for (slab, scale) in slabs.iter().zip(&scales) {
            if scale.shape().dims() != [slab.shape().rows()] {
                return Err(wrong("scale", scale, [slab.shape().rows()]));
            }
        }
        LinearParts { slabs, scales, ..LinearParts::default() }.with_bias(bias)
    }

    /// A layer of these packed matrices, checked to have one width, with a bias that fits.
    pub fn packed(packed: Vec<Packed>, bias: Option<HostTensor>) -> Result<Self, LinearError> {
        let cols = packed.first().ok_or(LinearError::NoSlab)?.cols();
        if let Some(other) = packed.iter().find(|p| p.cols() != cols) {
            let expected = [other.row_count(), cols].into();
            return Err(LinearError::Shape { what: "weight", found: other.shape().clone(), expected });
        }
        LinearParts { packed, ..LinearParts::default() }.with_bias(bias)
    }

    fn with_bias(self, bias: Option<HostTensor>) -> Result<Self, LinearError> {
        match &bias {
            Some(found) if found.shape().dims() != [self.rows()] => Err(wrong("bias", found, [self.rows()])),
            _ => Ok(LinearParts { bias, ..self }),
        }
    }

    /// Adds an update, checked against the layer's size.
    pub fn push_delta(&mut self, delta: Delta) -> Result<(), LinearError> {
        let (rank, cols) = matrix("delta down", &delta.down)?;
        if cols != self.cols() {
            return Err(wrong("delta down", &delta.down, [rank, self.cols()]));
        }
        let (rows, inner) = matrix("delta up", &delta.up)?;
        if inner != rank {
            return Err(wrong("delta up", &delta.up, [rows, rank]));
        }
        let end = delta.row.saturating_add(rows);
        if end > self.rows() {
            return Err(LinearError::DeltaRows { start: delta.row, end, rows: self.rows() });
        }
        self.deltas.push(delta);
        Ok(())
    }

    /// Output width: the rows of all slabs together.
    pub fn rows(&self) -> usize {
        self.shapes().map(Shape::rows).sum()
    }

    /// Input width.
    pub fn cols(&self) -> usize {
        self.shapes().next().map_or(0, Shape::last)
    }

    /// `[rows_i, cols]` of every slab or packed matrix.
    pub fn shapes(&self) -> impl Iterator<Item = &Shape> {
        self.slabs.iter().map(HostTensor::shape).chain(self.packed.iter().map(Packed::shape))
    }

    /// The element type of the slabs; packed matrices have none.
    pub fn dtype(&self) -> Option<DType> {
        self.slabs.first().map(HostTensor::dtype)
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
}

fn matrix(what: &'static str, tensor: &HostTensor) -> Result<(usize, usize), LinearError> {
    match tensor.shape().dims() {
        &[rows, cols] => Ok((rows, cols)),
        _ => Err(LinearError::NotAMatrix { what, found: tensor.shape().clone() }),
    }
}

fn wrong<const N: usize>(what: &'static str, tensor: &HostTensor, expected: [usize; N]) -> LinearError {
    LinearError::Shape { what, found: tensor.shape().clone(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros<const N: usize>(shape: [usize; N]) -> HostTensor {
        HostTensor::zeros(shape)
    }

    fn delta(row: usize, down: [usize; 2], up: [usize; 2]) -> Delta {
        Delta { row, down: zeros(down), up: zeros(up), scale: 1.0 }
    }

    #[test]
    fn slabs_stack_by_rows() {
        let parts = LinearParts::new(vec![zeros([4, 3]), zeros([2, 3])], Some(zeros([6]))).unwrap();
        assert_eq!((parts.rows(), parts.cols(), parts.dtype()), (6, 3, Some(DType::F32)));
    }

    #[test]
    fn slabs_must_be_matrices_of_one_width_and_dtype() {
        let message = |slabs, bias| LinearParts::new(slabs, bias).unwrap_err().to_string();
        assert_eq!(message(vec![], None), "a linear layer needs at least one weight");
        assert_eq!(message(vec![zeros([6])], None), "weight has shape [6], expected a matrix");
        assert_eq!(
            message(vec![zeros([4, 3]), zeros([4, 2])], None),
            "weight has shape [4, 2], expected [4, 3]"
        );
        assert_eq!(message(vec![zeros([4, 3])], Some(zeros([3]))), "bias has shape [3], expected [4]");
        let half = zeros([1, 3]).to_dtype(DType::BF16).unwrap();
        assert_eq!(
            message(vec![zeros([4, 3]), half], None),
            "the slabs of one linear layer must have one dtype, found f32 and bf16"
        );
    }

    #[test]
    fn slabs_of_i8_come_with_a_scale_a_row() {
        let slab = |rows| HostTensor::new(DType::I8, [rows, 3], vec![1; 3 * rows].into()).unwrap();
        let parts = LinearParts::scaled(vec![slab(4), slab(2)], vec![zeros([4]), zeros([2])], None).unwrap();
        assert_eq!((parts.rows(), parts.dtype()), (6, Some(DType::I8)));
        let message = |slabs, scales| LinearParts::scaled(slabs, scales, None).unwrap_err().to_string();
        assert_eq!(message(vec![slab(4)], vec![]), "1 slabs of i8 come with 0 vectors of scales");
        assert_eq!(
            message(vec![zeros([4, 3])], vec![zeros([4])]),
            "1 slabs of f32 come with 1 vectors of scales"
        );
        assert_eq!(message(vec![slab(4)], vec![zeros([3])]), "scale has shape [3], expected [4]");
    }

    #[test]
    fn deltas_must_fit_the_layer() {
        let mut parts = LinearParts::new(vec![zeros([4, 3]), zeros([2, 3])], None).unwrap();
        parts.push_delta(delta(4, [5, 3], [2, 5])).unwrap();
        assert_eq!((parts.deltas[0].rank(), parts.deltas[0].rows()), (5, 2));
        let mut message = |d| parts.push_delta(d).unwrap_err().to_string();
        assert_eq!(message(delta(0, [5, 4], [4, 5])), "delta down has shape [5, 4], expected [5, 3]");
        assert_eq!(message(delta(0, [5, 3], [4, 6])), "delta up has shape [4, 6], expected [4, 5]");
        assert_eq!(message(delta(5, [5, 3], [2, 5])), "a delta changes rows 5..7 of a linear layer with 6");
    }
}

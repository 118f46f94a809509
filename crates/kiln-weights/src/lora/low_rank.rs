//! LoKr and LoHa expanded to a low-rank pair of matrices, where that is exact and cheap.
//!
//! A LoKr with a factor of rank `r` is `kron(w1, a · b) = kron(I, a) · kron(w1, b)`, of rank `r` times the height of `w1`. A LoHa
//! is `(a · b) ∘ (c · d)`: row by row the Kronecker products of `a` and `c`, times column by column those of `b` and `d`. Such an
//! update is added to the layer's output, as a LoRA's is, and the weight stays as it is.

use kiln_tensor::{DType, HostTensor, Result};

use super::update::{Factor, KeyedTensor, Update};

/// The largest expanded rank that is worth its memory and time: rank 256 adds 9 % to the products of a 3072 × 27648 layer.
const MAX_RANK: usize = 256;

/// The ranks of the two factors, whose product is the expanded rank.
fn factor_ranks(update: &Update) -> Option<[usize; 2]> {
    match update {
        Update::LowRank { .. } | Update::Full(_) => None,
        Update::Kron { left, right } => {
            let max_rank = |factor: &Factor| factor.size()[0].min(factor.size()[1]);
            match (left, right) {
                (_, Factor::Product(_, b)) => Some([max_rank(left), b.size()[0]]),
                (Factor::Product(_, b), Factor::Whole(_)) => Some([b.size()[0], max_rank(right)]),
                (Factor::Whole(_), Factor::Whole(_)) => None,
            }
        }
        Update::Hadamard { first: [_, b], second: [_, d] } => Some([b.size()[0], d.size()[0]]),
    }
}

/// The rank of the expanded pair; `None` if the update is better left as it is.
pub(super) fn expanded_rank(update: &Update) -> Option<usize> {
    let ([a, b], [rows, cols]) = (factor_ranks(update)?, update.size()?);
    let rank = a.checked_mul(b).filter(|rank| *rank <= MAX_RANK)?;
    let (pair, full) = (rank.checked_mul(rows.checked_add(cols)?)?, rows.checked_mul(cols)?);
    (pair <= full / 2).then_some(rank)
}

/// Expands an update to `[down, up]` of [`expanded_rank`] in `dtype`, f32 or bf16.
pub(super) fn expand(update: &Update, dtype: DType) -> Result<Option<[HostTensor; 2]>> {
    if expanded_rank(update).is_none() {
        return Ok(None);
    }
    let pair = match update {
        Update::Kron { left, right } => Some(kron(left, right)?),
        Update::Hadamard { first: [a, b], second: [c, d] } => Some([column_kron(b, d)?, row_kron(a, c)?]),
        Update::LowRank { .. } | Update::Full(_) => None,
    };
    pair.map(|[down, up]| Ok([down.to_dtype(dtype)?, up.to_dtype(dtype)?])).transpose()
}

/// An f32 matrix.
struct Matrix {
    size: [usize; 2],
    values: Vec<f32>,
}

impl Matrix {
    fn read(matrix: &KeyedTensor) -> Result<Matrix> {
        Ok(Matrix { size: matrix.size(), values: matrix.tensor.to_f32()?.into_owned() })
    }

    fn identity(size: usize) -> Matrix {
        let values = (0..size * size).map(|i| f32::from(u8::from(i % (size + 1) == 0))).collect();
        Matrix { size: [size, size], values }
    }

    /// The two matrices whose product is a factor; a single matrix is paired with the smaller identity that fits.
    fn factors(factor: &Factor) -> Result<[Matrix; 2]> {
        match factor {
            Factor::Product(a, b) => Ok([Matrix::read(a)?, Matrix::read(b)?]),
            Factor::Whole(matrix) => Ok(Matrix::read(matrix)?.with_identity()),
        }
    }

    fn with_identity(self) -> [Matrix; 2] {
        let [rows, cols] = self.size;
        if rows <= cols { [Matrix::identity(rows), self] } else { [self, Matrix::identity(cols)] }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.size[1]..][..self.size[1]]
    }

    fn kron(&self, right: &Matrix) -> Result<HostTensor> {
        let ([a, b], [c, d]) = (self.size, right.size);
        let mut values = Vec::with_capacity(a * b * c * d);
        for row in 0..a * c {
            for left in self.row(row / c) {
                values.extend(right.row(row % c).iter().map(|right| left * right));
            }
        }
        HostTensor::from_f32([a * c, b * d], values)
    }
}

/// `kron(a · b, c · d) = kron(a, c) · kron(b, d)`.
fn kron(left: &Factor, right: &Factor) -> Result<[HostTensor; 2]> {
    // If both factors are products, multiply the left one out: it is small, and its rank may exceed its size.
    let left = match (left, right) {
        (Factor::Product(a, b), Factor::Product(..)) => {
            Matrix { size: left.size(), values: super::patch::product(a, b)? }.with_identity()
        }
        _ => Matrix::factors(left)?,
    };
    let right = Matrix::factors(right)?;
    Ok([left[1].kron(&right[1])?, left[0].kron(&right[0])?])
}

/// The Kronecker product of each row of `a` with the same row of `c`.
fn row_kron(a: &KeyedTensor, c: &KeyedTensor) -> Result<HostTensor> {
    let (a, c) = (Matrix::read(a)?, Matrix::read(c)?);
    let rows = a.size[0];
    let mut values = Vec::with_capacity(rows * a.size[1] * c.size[1]);
    for row in 0..rows {
        for left in a.row(row) {
            values.extend(c.row(row).iter().map(|right| left * right));
        }
    }
    HostTensor::from_f32([rows, a.size[1] * c.size[1]], values)
}

/// The Kronecker product of each column of `b` with the same column of `d`.
fn column_kron(b: &KeyedTensor, d: &KeyedTensor) -> Result<HostTensor> {
    let (b, d) = (Matrix::read(b)?, Matrix::read(d)?);
    let mut values = Vec::with_capacity(b.size[0] * d.values.len());
    for row in 0..b.size[0] {
        for other in 0..d.size[0] {
            values.extend(b.row(row).iter().zip(d.row(other)).map(|(b, d)| b * d));
        }
    }
    HostTensor::from_f32([b.size[0] * d.size[0], b.size[1]], values)
}

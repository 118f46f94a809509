//! Updates that are more than two thin matrices, added to the weight itself.
//!
//! The result is a copy of the layer, made row by row in f32 from whatever values the layer stands for: a Kronecker or
//! Hadamard product has the layer's full rank, and a DoRA changes the length of every row of the sum.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use kiln_tensor::{DType, HostTensor, Result, bf16};

use super::update::{Factor, Keyed, Update};

/// One module's change of a layer.
pub(crate) struct Merge {
    values: Values,
    /// Rows of the module, and the row of the layer where they go.
    pub(super) runs: Vec<(Range<usize>, usize)>,
    /// The file's own factor.
    scale: f32,
    /// The user's factor.
    weight: f32,
    magnitude: Magnitude,
}

/// DoRA's lengths.
pub(super) enum Magnitude {
    None,
    /// Of every row of the module.
    Rows(Vec<f32>),
    /// Of every column of the layer.
    Columns(Vec<f32>),
}

/// An update with its factors as floats.
enum Values {
    LowRank { down: Vec<f32>, up: Vec<f32> },
    Kron { left: Vec<f32>, width: usize, right: Vec<f32>, right_size: [usize; 2] },
    Hadamard { first: [Vec<f32>; 2], second: [Vec<f32>; 2] },
    Full(HostTensor),
}

impl Merge {
    /// The update must have been found to be of the layer's size: what is allocated here is no larger than the layer.
    pub(super) fn new(
        update: &Update,
        runs: Vec<(Range<usize>, usize)>,
        [scale, weight]: [f32; 2],
        magnitude: Magnitude,
    ) -> Result<Merge> {
        let floats = |matrix: &Keyed| Ok::<_, kiln_tensor::Error>(matrix.tensor.to_f32()?.into_owned());
        let values = match update {
            Update::LowRank { down, up } => Values::LowRank { down: floats(down)?, up: floats(up)? },
            Update::Kron { left, right } => Values::Kron {
                left: whole(left)?,
                width: left.size()[1],
                right: whole(right)?,
                right_size: right.size(),
            },
            Update::Hadamard { first: [a, b], second: [c, d] } => {
                Values::Hadamard { first: [floats(a)?, floats(b)?], second: [floats(c)?, floats(d)?] }
            }
            Update::Full(matrix) => Values::Full(matrix.tensor.clone()),
        };
        Ok(Merge { values, runs, scale, weight, magnitude })
    }

    /// The row of the module that goes to this row of the layer.
    fn source_row(&self, row: usize) -> Option<usize> {
        let from = |(from, at): &(Range<usize>, usize)| {
            let place = row.checked_sub(*at)?;
            (place < from.len()).then(|| from.start + place)
        };
        self.runs.iter().find_map(from)
    }

    /// One row of the change, scaled by the file's factor.
    fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match &self.values {
            Values::LowRank { down, up } => product_row(up, down, row, out),
            Values::Kron { left, width, right, right_size: [height, inner] } => {
                let left = &left[row / height * width..][..*width];
                let right = &right[row % height * inner..][..*inner];
                for (out, left) in out.chunks_exact_mut(*inner).zip(left) {
                    out.iter_mut().zip(right).for_each(|(out, right)| *out = left * right);
                }
            }
            Values::Hadamard { first: [a, b], second: [c, d] } => {
                let mut other = vec![0.0; out.len()];
                product_row(a, b, row, out);
                product_row(c, d, row, &mut other);
                out.iter_mut().zip(&other).for_each(|(out, other)| *out *= other);
            }
            Values::Full(matrix) => out.copy_from_slice(&matrix.rows(row..row + 1)?.to_f32()?),
        }
        out.iter_mut().for_each(|v| *v *= self.scale);
        Ok(())
    }

    /// Adds to `sum` what becomes of the base's row. `update` is scratch.
    fn add(&self, row: usize, base: &[f32], update: &mut [f32], sum: &mut [f32]) -> Result<()> {
        let Some(row) = self.source_row(row) else { return Ok(()) };
        self.row(row, update)?;
        match &self.magnitude {
            Magnitude::None => {
                sum.iter_mut().zip(update).for_each(|(sum, u)| *sum += self.weight * *u);
            }
            Magnitude::Rows(lengths) => {
                let squares = base.iter().zip(update.iter()).map(|(w, u)| f64::from(w + u).powi(2));
                let factor = ratio(lengths[row], squares.sum());
                for ((sum, w), u) in sum.iter_mut().zip(base).zip(update) {
                    *sum += self.weight * (factor * (w + *u) - w);
                }
            }
            Magnitude::Columns(factors) => {
                for (((sum, w), u), factor) in sum.iter_mut().zip(base).zip(update).zip(factors) {
                    *sum += self.weight * (factor * (w + *u) - w);
                }
            }
        }
        Ok(())
    }

    /// Turns lengths of columns into what the columns are to be multiplied with.
    fn measure_columns(&mut self, base: &HostTensor) -> Result<()> {
        let Magnitude::Columns(lengths) = &self.magnitude else { return Ok(()) };
        let mut squares = vec![0f64; lengths.len()];
        let mut update = vec![0f32; lengths.len()];
        for row in 0..base.shape().rows() {
            let Some(from) = self.source_row(row) else { continue };
            self.row(from, &mut update)?;
            let base = base.rows(row..row + 1)?;
            for ((square, w), u) in squares.iter_mut().zip(base.to_f32()?.iter()).zip(&update) {
                *square += f64::from(w + u).powi(2);
            }
        }
        let factors = lengths.iter().zip(&squares).map(|(length, square)| ratio(*length, *square)).collect();
        self.magnitude = Magnitude::Columns(factors);
        Ok(())
    }
}

/// The factor that gives a vector this length. One of zeros stays what it is.
fn ratio(length: f32, squares: f64) -> f32 {
    if squares == 0.0 { 0.0 } else { (f64::from(length) / squares.sqrt()) as f32 }
}

/// `out = left[row] · right`.
fn product_row(left: &[f32], right: &[f32], row: usize, out: &mut [f32]) {
    let rank = right.len() / out.len().max(1);
    out.fill(0.0);
    for (factor, right) in left[row * rank..][..rank].iter().zip(right.chunks_exact(out.len())) {
        out.iter_mut().zip(right).for_each(|(out, right)| *out += factor * right);
    }
}

fn whole(factor: &Factor) -> Result<Vec<f32>> {
    match factor {
        Factor::Whole(matrix) => Ok(matrix.tensor.to_f32()?.into_owned()),
        Factor::Product(a, b) => {
            let (left, right) = (a.tensor.to_f32()?, b.tensor.to_f32()?);
            let [rows, cols] = factor.size();
            let mut out = vec![0.0; rows * cols];
            out.chunks_exact_mut(cols)
                .enumerate()
                .for_each(|(row, out)| product_row(&left, &right, row, out));
            Ok(out)
        }
    }
}

/// The layer with these changes, as f32 or bf16.
pub(crate) fn merge(base: &HostTensor, mut changes: Vec<Merge>, dtype: DType) -> Result<HostTensor> {
    for change in &mut changes {
        change.measure_columns(base)?;
    }
    match dtype {
        DType::BF16 => HostTensor::from_bf16(base.shape(), rows(base, &changes, bf16::from_f32)?),
        _ => HostTensor::from_f32(base.shape(), rows(base, &changes, |v| v)?),
    }
}

/// Rows that a thread takes at a time.
const ROWS_AT_ONCE: usize = 64;

/// Every row by itself, so that the number of threads changes nothing.
fn rows<T: Copy + Default + Send>(
    base: &HostTensor,
    changes: &[Merge],
    to: impl Fn(f32) -> T + Copy + Sync,
) -> Result<Vec<T>> {
    let cols = base.shape().last();
    let mut out = vec![T::default(); base.numel()];
    let pieces: Vec<_> = out.chunks_mut((ROWS_AT_ONCE * cols).max(1)).map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        let (mut update, mut sum) = (vec![0f32; cols], vec![0f32; cols]);
        while let Some((i, piece)) = Some(next.fetch_add(1, Relaxed)).and_then(|i| Some((i, pieces.get(i)?)))
        {
            // Nobody else has this number; a lock is how to say so without `unsafe`.
            let mut piece = piece.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            for (row, out) in (i * ROWS_AT_ONCE..).zip(piece.chunks_exact_mut(cols)) {
                let base = base.rows(row..row + 1)?;
                let base = base.to_f32()?;
                sum.copy_from_slice(&base);
                changes.iter().try_for_each(|change| change.add(row, &base, &mut update, &mut sum))?;
                out.iter_mut().zip(&sum).for_each(|(out, sum)| *out = to(*sum));
            }
        }
        Ok(())
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(pieces.len());
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mine = work();
        // A thread that panicked has panicked here, too, had it been this one: hand that on.
        others.into_iter().try_fold((), |(), t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))?;
        mine
    })?;
    Ok(out)
}

//! DoRA: the rows (or columns) of weight and update together get lengths that were learnt.
//!
//! `‖·‖` of them is measured once, when a LoRA is laid over a layer. Then rows of the weight have a factor, rows of the
//! update have it, too, and neither is copied.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use kiln_base::lock;
use kiln_tensor::packed::Packed;

use super::merge::{Gains, Runs, Values, source_row};

/// The lengths that a file has.
pub(super) enum Lengths {
    /// Of every row of the module.
    Rows(Vec<f32>),
    /// Of every column of the layer.
    Columns(Vec<f32>),
}

/// A layer's matrices below each other.
pub(super) struct Base(pub Vec<Packed>);

impl Base {
    fn rows(&self) -> usize {
        self.0.iter().map(Packed::row_count).sum()
    }

    fn read(&self, mut row: usize, out: &mut [f32]) {
        for matrix in &self.0 {
            if row < matrix.row_count() {
                return matrix.read(row, 0, out);
            }
            row -= matrix.row_count();
        }
    }
}

/// What `lengths` make of a layer of `cols` columns under an update, `scale` times `values`.
pub(super) fn gains(
    base: &Base,
    cols: usize,
    (values, scale): (&Values, f32),
    runs: &Runs,
    lengths: &Lengths,
) -> Gains {
    let sum = |row: usize, out: &mut [f32]| {
        let source = source_row(runs, row)?;
        base.read(row, out);
        values.add(source, 0, scale, out);
        Some(source)
    };
    match lengths {
        Lengths::Rows(lengths) => Gains::Rows(each_row(base.rows(), cols, |row, out| {
            sum(row, out).map_or(1.0, |source| ratio(lengths[source], square(out)))
        })),
        Lengths::Columns(lengths) => {
            let (mut squares, mut out) = (vec![0f64; cols], vec![0f32; cols]);
            for row in 0..base.rows() {
                if sum(row, &mut out).is_some() {
                    squares.iter_mut().zip(&out).for_each(|(sum, v)| *sum += f64::from(*v).powi(2));
                }
            }
            Gains::Columns(lengths.iter().zip(&squares).map(|(length, sum)| ratio(*length, *sum)).collect())
        }
    }
}

/// The sum of squares; in f64 but for the innermost, so that long rows lose nothing.
fn square(values: &[f32]) -> f64 {
    values.chunks(64).map(|v| f64::from(v.iter().map(|v| v * v).sum::<f32>())).sum()
}

/// The factor that gives a vector this length. One of zeros stays what it is.
fn ratio(length: f32, squares: f64) -> f32 {
    if squares == 0.0 { 0.0 } else { (f64::from(length) / squares.sqrt()) as f32 }
}

/// Rows that a thread takes at a time.
const ROWS_AT_ONCE: usize = 64;

/// A number for every row, by all cores. `of` gets room for the row.
fn each_row(rows: usize, cols: usize, of: impl Fn(usize, &mut [f32]) -> f32 + Sync) -> Vec<f32> {
    let mut numbers = vec![0f32; rows];
    let pieces: Vec<_> = numbers.chunks_mut(ROWS_AT_ONCE).map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut scratch = vec![0f32; cols];
        while let Some((i, piece)) = Some(next.fetch_add(1, Relaxed)).and_then(|i| Some((i, pieces.get(i)?)))
        {
            // Nobody else has this number; a lock is how to say so without `unsafe`.
            let mut piece = lock(&piece);
            for (row, number) in (i * ROWS_AT_ONCE..).zip(piece.iter_mut()) {
                *number = of(row, &mut scratch);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(pieces.len());
    thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    numbers
}

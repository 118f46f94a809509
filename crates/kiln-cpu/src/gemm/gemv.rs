//! Products of very few rows (gemv): every weight row is read once and multiplied with all of them, without packing.

use kiln_ops::Result;
use kiln_tensor::{bf16, f16};

use super::blocks::{Block, BlockGrid, ScratchSizes};
use super::{Epilogue, SumBlock, run_epilogue};
use crate::Context;
use crate::element::Scalar;
use crate::matrix::{Format, StackedMatrix};
use crate::simd::{MAX_LANES, Simd, Sum, dispatch};

/// Maximum rows for which [`gemv`] is used.
pub(crate) const GEMV_MAX_ROWS: usize = 5;

/// Weight rows of a task.
const NC: usize = 64;

/// Sums per row, so that additions don't wait for each other.
const SUMS: usize = 2;
/// Values of a weight row that are multiplied at once.
const STEP: usize = SUMS * MAX_LANES;

/// `x[i] · w` for `ROWS` rows of `x`, each `w.len()` values, where `w` need not be aligned.
#[inline(always)]
fn dot_rows<S: Simd, T: Scalar, const ROWS: usize>(s: S, w: &[u8], x: &[f32]) -> [f32; ROWS] {
    let depth = w.len() / size_of::<T>();
    assert!(x.len() >= ROWS * depth);
    let w = w.as_ptr().cast::<T>();
    let mut sums = [[Sum::zero(s); SUMS]; ROWS];
    let whole = depth / STEP * STEP;
    let mut k = 0;
    while k < whole {
        // SAFETY: k + STEP <= depth, the length of w and of every row of x.
        unsafe { add_step(s, w.add(k), x.as_ptr().add(k), depth, &mut sums) };
        k += STEP;
    }
    if whole < depth {
        // The rest, followed by zeros.
        let mut last_w = [T::zeroed(); STEP];
        let mut last_x = [[0.0; STEP]; ROWS];
        for (i, last_w) in last_w[..depth - whole].iter_mut().enumerate() {
            // SAFETY: whole + i < depth.
            *last_w = unsafe { w.add(whole + i).read_unaligned() };
        }
        for (i, last_x) in last_x.iter_mut().enumerate() {
            last_x[..depth - whole].copy_from_slice(&x[i * depth + whole..(i + 1) * depth]);
        }
        // SAFETY: STEP values of everything.
        unsafe { add_step(s, last_w.as_ptr(), last_x.as_ptr().cast(), STEP, &mut sums) };
    }
    let mut out = [0.0; ROWS];
    for (out, &[a, b]) in out.iter_mut().zip(&sums) {
        *out = a.plus(s, b).total(s);
    }
    out
}

/// Adds the products of [`STEP`] values.
///
/// # Safety
/// As many can be read at `w` and of each row of `x`, which are `stride` apart. Neither needs alignment.
#[inline(always)]
unsafe fn add_step<S: Simd, T: Scalar, const ROWS: usize>(
    s: S,
    w: *const T,
    x: *const f32,
    stride: usize,
    sums: &mut [[Sum<S>; SUMS]; ROWS],
) {
    for sum in 0..SUMS {
        for part in 0..Sum::<S>::PARTS {
            let at = sum * MAX_LANES + part * S::LANES;
            // SAFETY: at + LANES <= STEP.
            unsafe {
                let w = T::load(s, w.add(at));
                for (i, sums) in sums.iter_mut().enumerate() {
                    sums[sum].add_product(s, part, w, s.load(x.add(i * stride + at)));
                }
            }
        }
    }
}

/// One of the products that add up to the result.
#[derive(Clone, Copy)]
pub(crate) struct GemvTerm<'a> {
    /// `[rows, weight.cols]`.
    pub x: &'a [f32],
    pub weight: &'a StackedMatrix,
    /// The column of the result that the weight's first row computes.
    pub first_col: usize,
}

/// Adds the product with `count` weight rows from `first` on to `out`, whose rows are [`NC`] apart. `row` is scratch for
/// one unpacked weight row.
#[inline(always)]
fn gemv_kernel<S: Simd>(
    s: S,
    term: GemvTerm<'_>,
    rows: usize,
    first: usize,
    count: usize,
    row: &mut [f32],
    out: &mut [f32],
) {
    let GemvTerm { x, weight, .. } = term;
    for j in 0..count {
        let out = &mut out[j..];
        match weight.format {
            Format::F32 => add_weight_row::<S, f32>(s, weight.row(first + j), x, rows, out),
            Format::BF16 => add_weight_row::<S, bf16>(s, weight.row(first + j), x, rows, out),
            Format::F16 => add_weight_row::<S, f16>(s, weight.row(first + j), x, rows, out),
            Format::Packed => {
                let row = &mut row[..weight.cols];
                weight.unpack(s, first + j, 0, row);
                add_weight_row::<S, f32>(s, bytemuck::cast_slice(row), x, rows, out);
            }
            Format::I8 => unreachable!("int8 weights have kernels of their own"),
        }
    }
}

/// Adds the products of one weight row.
#[inline(always)]
fn add_weight_row<S: Simd, T: Scalar>(s: S, w: &[u8], x: &[f32], rows: usize, out: &mut [f32]) {
    // Where vectors are short, the sums of fewer rows fill 32 registers.
    let together = GEMV_MAX_ROWS.min(24 / (SUMS * Sum::<S>::PARTS));
    let depth = w.len() / size_of::<T>();
    for first in (0..rows).step_by(together) {
        let (x, out) = (&x[first * depth..], &mut out[first * NC..]);
        match together.min(rows - first) {
            1 => add_column(dot_rows::<S, T, 1>(s, w, x), out),
            2 => add_column(dot_rows::<S, T, 2>(s, w, x), out),
            3 => add_column(dot_rows::<S, T, 3>(s, w, x), out),
            4 => add_column(dot_rows::<S, T, 4>(s, w, x), out),
            GEMV_MAX_ROWS => add_column(dot_rows::<S, T, GEMV_MAX_ROWS>(s, w, x), out),
            _ => unreachable!("1 to GEMV_MAX_ROWS rows"),
        }
    }
}

#[inline(always)]
fn add_column<const ROWS: usize>(sums: [f32; ROWS], out: &mut [f32]) {
    for (i, sum) in sums.into_iter().enumerate() {
        out[i * NC] += sum;
    }
}

dispatch! {
    fn gemv_block(
        term: GemvTerm<'_>, rows: usize, first: usize, count: usize, row: &mut [f32], out: &mut [f32],
    ) => gemv_kernel;
}

/// Computes `Σ term.x · term.weightᵀ`, `rows` × `cols` with `rows <= GEMV_MAX_ROWS`.
pub(crate) fn gemv<E: Epilogue>(
    cx: &Context,
    terms: &[GemvTerm<'_>],
    [rows, cols]: [usize; 2],
    epilogue: &E,
) -> Result<()> {
    let packed = terms.iter().filter(|term| term.weight.format == Format::Packed);
    let scratch = ScratchSizes {
        packed: packed.map(|term| term.weight.cols * size_of::<f32>()).max().unwrap_or(0),
        sums: GEMV_MAX_ROWS * NC,
        ..ScratchSizes::default()
    };
    BlockGrid::new([rows, cols], [GEMV_MAX_ROWS, NC]).run(cx, scratch, |task, scratch| {
        let Block { rows, cols } = task.block;
        scratch.sums.fill(0.0);
        for term in terms {
            let reached = cols.start.max(term.first_col)..cols.end.min(term.first_col + term.weight.rows);
            if !reached.is_empty() {
                let first = reached.start - term.first_col;
                let row = bytemuck::cast_slice_mut(&mut scratch.packed);
                let out = &mut scratch.sums[reached.start - cols.start..];
                gemv_block(cx.level, *term, rows.len(), first, reached.len(), row, out);
            }
        }
        run_epilogue(cx.level, epilogue, SumBlock { rows, cols, sums: &scratch.sums, stride: NC });
    })
}

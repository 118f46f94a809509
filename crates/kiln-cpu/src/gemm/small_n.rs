//! Products with very few columns, by dot products: a register tile would be mostly empty.

use super::RowSource;
use crate::simd::{MAX_LANES, Simd, Sum, dispatch};

/// Maximum columns for which [`gemm_small_n`] is used, and the distance between its rows of sums.
pub(crate) const SMALL_N: usize = 4;
/// Rows of the left operand taken together, so that a vector of the right one is read once for all of them.
const ROW_GROUP: usize = 4;

/// The distance between rows of `depth` values: whole vectors of any instruction set.
pub(crate) fn padded_depth(depth: usize) -> usize {
    depth.next_multiple_of(MAX_LANES)
}

/// The length of the scratch that [`gemm_small_n`] needs.
pub(crate) fn small_n_scratch_len(depth: usize) -> usize {
    ROW_GROUP * padded_depth(depth)
}

/// `COLS` sums for each of the [`ROW_GROUP`] rows in `left`; `stride` is a multiple of [`MAX_LANES`].
#[inline(always)]
fn dot_group<S: Simd, const COLS: usize>(
    s: S,
    left: &[f32],
    right: &[f32],
    stride: usize,
) -> [[f32; COLS]; ROW_GROUP] {
    assert!(
        stride.is_multiple_of(MAX_LANES) && left.len() >= ROW_GROUP * stride && right.len() >= COLS * stride
    );
    let mut totals = [[Sum::zero(s); COLS]; ROW_GROUP];
    // Part after part: the sums of one fill the registers.
    for part in 0..Sum::<S>::PARTS {
        let mut sums = [[s.splat(0.0); COLS]; ROW_GROUP];
        for k in (part * S::LANES..stride).step_by(MAX_LANES) {
            // SAFETY: k + LANES <= stride, and the lengths were checked above.
            unsafe {
                let mut columns = [s.splat(0.0); COLS];
                for (j, column) in columns.iter_mut().enumerate() {
                    *column = s.load(right.as_ptr().add(j * stride + k));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let row = s.load(left.as_ptr().add(i * stride + k));
                    for (sum, &column) in sums.iter_mut().zip(&columns) {
                        *sum = s.fma(row, column, *sum);
                    }
                }
            }
        }
        for (totals, sums) in totals.iter_mut().zip(sums) {
            for (total, sum) in totals.iter_mut().zip(sums) {
                total.add(s, part, sum);
            }
        }
    }
    let mut out = [[0.0; COLS]; ROW_GROUP];
    for (out, totals) in out.iter_mut().zip(totals) {
        for (out, total) in out.iter_mut().zip(totals) {
            *out = total.total(s);
        }
    }
    out
}

/// The operands of [`gemm_small_n`].
pub(crate) struct SmallNOperands<'a, R> {
    pub left: &'a R,
    pub depth: usize,
    /// `[cols, padded_depth(depth)]`, zeros at the end of each row.
    pub right: &'a [f32],
    pub cols: usize,
}

#[inline(always)]
fn small_n_kernel<S: Simd, R: RowSource>(
    s: S,
    operands: &SmallNOperands<'_, R>,
    first: usize,
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let SmallNOperands { left, depth, right, cols } = *operands;
    let stride = padded_depth(depth);
    let scratch = &mut scratch[..ROW_GROUP * stride];
    for (group, out) in out.chunks_mut(ROW_GROUP * SMALL_N).enumerate() {
        let rows = out.len() / SMALL_N;
        for (i, row) in scratch.chunks_exact_mut(stride).enumerate() {
            let (values, padding) = row.split_at_mut(depth);
            padding.fill(0.0);
            if i < rows {
                left.read_row(s, first + group * ROW_GROUP + i, 0, values);
            }
        }
        match cols {
            1 => store_rows(dot_group::<S, 1>(s, scratch, right, stride), out),
            2 => store_rows(dot_group::<S, 2>(s, scratch, right, stride), out),
            3 => store_rows(dot_group::<S, 3>(s, scratch, right, stride), out),
            SMALL_N => store_rows(dot_group::<S, SMALL_N>(s, scratch, right, stride), out),
            _ => unreachable!("1 to SMALL_N columns"),
        }
    }
}

#[inline(always)]
fn store_rows<const COLS: usize>(sums: [[f32; COLS]; ROW_GROUP], out: &mut [f32]) {
    for (out, sums) in out.chunks_exact_mut(SMALL_N).zip(sums) {
        out[..COLS].copy_from_slice(&sums);
    }
}

dispatch! {
    /// Writes the sums of the rows from `first` on, [`SMALL_N`] apart, as many as `out` has room for.
    pub(crate) fn gemm_small_n<R: RowSource>(
        operands: &SmallNOperands<'_, R>, first: usize, scratch: &mut [f32], out: &mut [f32],
    ) => small_n_kernel;
}

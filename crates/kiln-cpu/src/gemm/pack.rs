use std::ops::Range;

use kiln_ops::Result;

use super::DEPTH;
use crate::Context;
use crate::buffer::Buffer;
use crate::parallel::Disjoint;
use crate::simd::{Simd, dispatch};

/// A matrix that can be read row by row, whatever its format and wherever its parts lie.
pub(crate) trait Rows: Sync {
    /// Writes the values of `row` from column `from` on.
    fn fill<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]);
}

#[inline(always)]
fn pack_left_kernel<S: Simd, R: Rows>(
    s: S,
    source: &R,
    first: usize,
    from: usize,
    depth: usize,
    out: &mut [f32],
) {
    for (i, out) in out.chunks_mut(DEPTH).enumerate() {
        source.fill(s, first + i, from, &mut out[..depth]);
    }
}

dispatch! {
    /// Packs columns `from..from + depth` of as many rows as `out` has room for at `DEPTH` a row.
    pub(crate) fn pack_left<R: Rows>(
        source: &R, first: usize, from: usize, depth: usize, out: &mut [f32],
    ) => pack_left_kernel;
}

/// The largest panel width, `Simd::TILE_COLS`, of all instruction sets.
const MAX_COLS: usize = 32;

#[inline(always)]
fn pack_right_kernel<S: Simd, R: Rows>(
    s: S,
    source: &R,
    first: usize,
    from: usize,
    depth: usize,
    out: &mut [f32],
) {
    const { assert!(S::TILE_COLS <= MAX_COLS && S::TILE_COLS.is_multiple_of(S::LANES)) }
    assert!(depth <= DEPTH);
    let mut rows = [0f32; MAX_COLS * DEPTH];
    for (panel, out) in out.chunks_exact_mut(S::TILE_COLS * depth).enumerate() {
        for (j, row) in rows.chunks_mut(DEPTH).take(S::TILE_COLS).enumerate() {
            source.fill(s, first + panel * S::TILE_COLS + j, from, &mut row[..depth]);
        }
        let whole = depth / S::LANES * S::LANES;
        for k in (0..whole).step_by(S::LANES) {
            for j in (0..S::TILE_COLS).step_by(S::LANES) {
                // SAFETY: a square of LANES × LANES inside both: j + LANES <= TILE_COLS, k + LANES <= depth.
                unsafe {
                    let to = out.as_mut_ptr().add(k * S::TILE_COLS + j);
                    s.transpose(rows.as_ptr().add(j * DEPTH + k), DEPTH, to, S::TILE_COLS);
                }
            }
        }
        for k in whole..depth {
            for j in 0..S::TILE_COLS {
                out[k * S::TILE_COLS + j] = rows[j * DEPTH + k];
            }
        }
    }
}

dispatch! {
    /// Packs columns `from..from + depth` of the rows from `first` on, as many panels as `out` has room for.
    pub(crate) fn pack_right<R: Rows>(
        source: &R, first: usize, from: usize, depth: usize, out: &mut [f32],
    ) => pack_right_kernel;
}

#[inline(always)]
fn pack_plain_kernel<S: Simd, R: Rows>(
    s: S,
    source: &R,
    first: usize,
    from: usize,
    width: usize,
    depth: usize,
    out: &mut [f32],
) {
    for (panel, out) in out.chunks_exact_mut(S::TILE_COLS * depth).enumerate() {
        let col = panel * S::TILE_COLS;
        let inside = S::TILE_COLS.min(width.saturating_sub(col));
        for (k, out) in out.chunks_exact_mut(S::TILE_COLS).enumerate() {
            source.fill(s, first + k, from + col, &mut out[..inside]);
            out[inside..].fill(0.0);
        }
    }
}

dispatch! {
    /// Packs a right operand that is stored transposed: `depth` rows from `first` on, columns `from..from + width`,
    /// as many panels of columns as `out` has room for.
    pub(crate) fn pack_plain<R: Rows>(
        source: &R, first: usize, from: usize, width: usize, depth: usize, out: &mut [f32],
    ) => pack_plain_kernel;
}

#[inline(always)]
fn widen_rows_kernel<S: Simd, R: Rows>(s: S, source: &R, width: usize, stride: usize, out: &mut [f32]) {
    for (row, out) in out.chunks_exact_mut(stride).enumerate() {
        source.fill(s, row, 0, &mut out[..width]);
    }
}

dispatch! {
    /// Writes the first rows, `stride` apart, as many as `out` has room for.
    pub(crate) fn widen_rows<R: Rows>(
        source: &R, width: usize, stride: usize, out: &mut [f32],
    ) => widen_rows_kernel;
}

/// Rows of a left operand, packed: for every block of [`DEPTH`] columns, all of them.
pub(crate) struct Packed {
    data: Buffer<f32>,
    pub rows: Range<usize>,
    pub depth: usize,
}

impl Packed {
    pub fn new<R: Rows>(cx: &Context, source: &R, rows: Range<usize>, depth: usize) -> Result<Packed> {
        const ROWS_AT_ONCE: usize = 32;
        let (blocks, height) = (depth.div_ceil(DEPTH), rows.len());
        let mut data = cx.buffer(blocks.saturating_mul(height).saturating_mul(DEPTH))?;
        let out = Disjoint::new(&mut data);
        cx.pool.each(blocks * height.div_ceil(ROWS_AT_ONCE), |task| {
            let (block, first) = (task % blocks, task / blocks * ROWS_AT_ONCE);
            let end = height.min(first + ROWS_AT_ONCE);
            let from = block * DEPTH;
            // SAFETY: every task has rows of its own in its block.
            let out = unsafe { out.slice((block * height + first) * DEPTH..(block * height + end) * DEPTH) };
            pack_left(cx.level, source, rows.start + first, from, DEPTH.min(depth - from), out);
        });
        Ok(Packed { data, rows, depth })
    }

    /// Each block's first column, its width, and its values for some of the rows.
    pub fn blocks(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, usize, &[f32])> {
        (0..self.depth.div_ceil(DEPTH)).map(move |block| {
            let from = block * DEPTH;
            let start = (block * self.rows.len() + rows.start - self.rows.start) * DEPTH;
            (from, DEPTH.min(self.depth - from), &self.data[start..][..rows.len() * DEPTH])
        })
    }
}

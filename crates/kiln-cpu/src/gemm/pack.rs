//! Packing of the f32 operands. The left one keeps its rows, in blocks of [`KC`] columns; the right one becomes panels
//! of `TILE_COLS` transposed rows.

use std::ops::Range;

use kiln_ops::Result;

use super::RowSource;
use crate::Context;
use crate::buffer::Buffer;
use crate::parallel::DisjointMut;
use crate::simd::{KC, Simd, dispatch};

#[inline(always)]
fn pack_left_kernel<S: Simd, R: RowSource>(
    s: S,
    source: &R,
    first: usize,
    from: usize,
    depth: usize,
    out: &mut [f32],
) {
    for (i, out) in out.chunks_mut(KC).enumerate() {
        source.read_row(s, first + i, from, &mut out[..depth]);
    }
}

dispatch! {
    /// Packs columns `from..from + depth` of the rows from `first` on, `KC` apart, as many as `out` has room for.
    pub(crate) fn pack_left<R: RowSource>(
        source: &R, first: usize, from: usize, depth: usize, out: &mut [f32],
    ) => pack_left_kernel;
}

/// The largest panel width, `Simd::TILE_COLS`, of all instruction sets.
const MAX_TILE_COLS: usize = 32;

#[inline(always)]
fn pack_right_kernel<S: Simd, R: RowSource>(
    s: S,
    source: &R,
    first: usize,
    from: usize,
    depth: usize,
    out: &mut [f32],
) {
    const { assert!(S::TILE_COLS <= MAX_TILE_COLS && S::TILE_COLS.is_multiple_of(S::LANES)) }
    assert!(depth <= KC);
    let mut rows = [0f32; MAX_TILE_COLS * KC];
    for (panel, out) in out.chunks_exact_mut(S::TILE_COLS * depth).enumerate() {
        for (j, row) in rows.chunks_mut(KC).take(S::TILE_COLS).enumerate() {
            source.read_row(s, first + panel * S::TILE_COLS + j, from, &mut row[..depth]);
        }
        let whole = depth / S::LANES * S::LANES;
        for k in (0..whole).step_by(S::LANES) {
            for j in (0..S::TILE_COLS).step_by(S::LANES) {
                // SAFETY: a square of LANES × LANES inside both: j + LANES <= TILE_COLS, k + LANES <= depth.
                unsafe {
                    let to = out.as_mut_ptr().add(k * S::TILE_COLS + j);
                    s.transpose(rows.as_ptr().add(j * KC + k), KC, to, S::TILE_COLS);
                }
            }
        }
        for k in whole..depth {
            for j in 0..S::TILE_COLS {
                out[k * S::TILE_COLS + j] = rows[j * KC + k];
            }
        }
    }
}

dispatch! {
    /// Packs columns `from..from + depth` of the rows from `first` on, as many panels as `out` has room for.
    pub(crate) fn pack_right<R: RowSource>(
        source: &R, first: usize, from: usize, depth: usize, out: &mut [f32],
    ) => pack_right_kernel;
}

#[inline(always)]
fn pack_right_kn_kernel<S: Simd, R: RowSource>(
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
            source.read_row(s, first + k, from + col, &mut out[..inside]);
            out[inside..].fill(0.0);
        }
    }
}

dispatch! {
    /// Packs a right operand stored as `[depth, columns]`: `depth` rows from `first` on, columns `from..from + width`,
    /// as many panels as `out` has room for.
    pub(crate) fn pack_right_kn<R: RowSource>(
        source: &R, first: usize, from: usize, width: usize, depth: usize, out: &mut [f32],
    ) => pack_right_kn_kernel;
}

#[inline(always)]
fn read_row_kernel<S: Simd, R: RowSource>(s: S, source: &R, row: usize, out: &mut [f32]) {
    source.read_row(s, row, 0, out);
}

dispatch! {
    /// Writes the start of a row as f32.
    pub(crate) fn read_row<R: RowSource>(source: &R, row: usize, out: &mut [f32]) => read_row_kernel;
}

#[inline(always)]
fn widen_rows_kernel<S: Simd, R: RowSource>(s: S, source: &R, width: usize, stride: usize, out: &mut [f32]) {
    for (row, out) in out.chunks_exact_mut(stride).enumerate() {
        source.read_row(s, row, 0, &mut out[..width]);
    }
}

dispatch! {
    /// Writes the first rows as f32, `stride` apart, as many as `out` has room for.
    pub(crate) fn widen_rows<R: RowSource>(
        source: &R, width: usize, stride: usize, out: &mut [f32],
    ) => widen_rows_kernel;
}

/// Packed rows of a left operand: for every block of [`KC`] columns, all rows.
pub(crate) struct PackedLeft {
    data: Buffer<f32>,
    pub rows: Range<usize>,
    pub depth: usize,
}

impl PackedLeft {
    /// Packs `rows` of the source, which have `depth` columns.
    pub fn new<R: RowSource>(
        cx: &Context,
        source: &R,
        rows: Range<usize>,
        depth: usize,
    ) -> Result<PackedLeft> {
        const PACK_ROWS_PER_TASK: usize = 32;
        let (blocks, height) = (depth.div_ceil(KC), rows.len());
        let mut data = cx.buffer(blocks.saturating_mul(height).saturating_mul(KC))?;
        let out = DisjointMut::new(&mut data);
        cx.pool.for_each(blocks * height.div_ceil(PACK_ROWS_PER_TASK), |task| {
            let (block, first) = (task % blocks, task / blocks * PACK_ROWS_PER_TASK);
            let end = height.min(first + PACK_ROWS_PER_TASK);
            let from = block * KC;
            // SAFETY: every task has rows of its own in its block.
            let out = unsafe { out.slice((block * height + first) * KC..(block * height + end) * KC) };
            pack_left(cx.level, source, rows.start + first, from, KC.min(depth - from), out);
        });
        Ok(PackedLeft { data, rows, depth })
    }

    /// For each block its first column, its width, and its values for some of the rows.
    pub fn blocks(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, usize, &[f32])> {
        (0..self.depth.div_ceil(KC)).map(move |block| {
            let from = block * KC;
            let start = (block * self.rows.len() + rows.start - self.rows.start) * KC;
            (from, KC.min(self.depth - from), &self.data[start..][..rows.len() * KC])
        })
    }
}

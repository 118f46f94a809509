//! Packing of operands in f32. The left one keeps its rows, in blocks of [`KC`] columns; the right one becomes panels
//! of `TILE_COLS` transposed rows.

use super::RowSource;
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
    /// [`PackedFormat::pack_left`](super::PackedFormat::pack_left).
    pub(super) fn pack_left<R: RowSource>(
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
    /// [`PackedFormat::pack_right`](super::PackedFormat::pack_right).
    pub(super) fn pack_right<R: RowSource>(
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
    /// [`PackedFormat::pack_right_kn`](super::PackedFormat::pack_right_kn).
    pub(super) fn pack_right_kn<R: RowSource>(
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

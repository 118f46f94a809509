//! Products of bytes in AMX tiles.
//!
//! Computed as `yᵀ = W · xᵀ`, as [`gemm::amx`](crate::gemm) does for bf16: weight rows are copied into left tiles as they
//! lie, only the activations are rearranged. A step multiplies 32 weight rows by 32 tokens over 64 columns.

use std::ops::Range;

use kiln_ops::Result;

use super::finish::{Updates, scale};
use super::quantise::{Quantised, quantise};
use super::words::Kind;
use super::{Int8, Rows, Sink, Term};
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::cut::{Blocks, Cut};
use crate::gemm::product::{Finished, emit};
use crate::parallel::Disjoint;
use crate::simd::{Amx, BYTE_TILE, BytePair, Simd, Tiles};
use crate::weight::Stack;

/// Columns summed in one go. The weight rows of a step (32 KiB) stay in the first-level cache while the tokens go by.
const BLOCK: usize = 1024;
/// Columns of one tile.
const STEP: usize = 64;
/// Rows of two tiles: weight rows, or tokens, that a step takes.
const PAIR: usize = 32;
/// Sums of a step.
const SUMS: usize = PAIR * PAIR;

/// Tokens that a thread works on at once. A block of their columns (512 KiB) stays in the second-level cache.
const TOKENS_AT_ONCE: usize = 512;
/// Weight rows that a thread works on at once; their sums (512 KiB) stay there too.
const COLS_AT_ONCE: usize = 256;

/// Activations as right tiles: for every block of columns, for every [`PAIR`] of tokens, two tiles a step.
pub(crate) struct TokenTiles {
    data: Buffer<i8>,
    rows: Range<usize>,
    depth: usize,
    scales: Buffer<f32>,
}

impl TokenTiles {
    pub fn new<X: Rows>(cx: &Context, amx: Amx, x: &X, rows: Range<usize>, depth: usize) -> Result<Self> {
        let kind = Kind::of(cx.level);
        let pairs = rows.len().div_ceil(PAIR);
        let (area, padded) = (pairs.saturating_mul(PAIR), depth.next_multiple_of(STEP));
        // Rows of the scratch lie a line further apart, so that they don't share the few sets of a cache.
        let stride = padded + 64;
        let mut data = cx.buffer::<i8>(area.saturating_mul(padded))?;
        let mut scales = cx.buffer::<f32>(area)?;
        {
            let (out, scales) = (Disjoint::new(&mut data), Disjoint::new(&mut scales));
            let scratch = || Ok((cx.buffer::<f32>(depth)?, cx.buffer::<i8>(PAIR * stride)?));
            cx.pool.each_with(pairs, scratch, |pair, (wide, lines)| {
                // SAFETY: every task has tokens of its own.
                let scales = unsafe { scales.slice(pair * PAIR..(pair + 1) * PAIR) };
                for (i, (line, scale)) in lines.chunks_exact_mut(stride).zip(scales).enumerate() {
                    let row = rows.start + pair * PAIR + i;
                    *scale = 0.0;
                    match row < rows.end {
                        true => *scale = quantise(kind, x, row, wide, &mut line[..padded]).scale,
                        false => line.fill(0),
                    }
                }
                for from in (0..depth).step_by(BLOCK) {
                    let steps = BLOCK.min(depth - from).div_ceil(STEP);
                    let at = area * from + pair * steps * 2 * BYTE_TILE;
                    // SAFETY: every task has tiles of its own.
                    let out = unsafe { out.slice(at..at + steps * 2 * BYTE_TILE) };
                    // SAFETY: the token proves AVX-512.
                    unsafe { transpose_fours(amx, &lines[from..], stride, steps, out) };
                }
            })?;
        }
        Ok(TokenTiles { data, rows, depth, scales })
    }

    /// The tiles of the `pair`th [`PAIR`] of tokens in the block that begins at column `from`.
    fn tiles(&self, from: usize, steps: usize, pair: usize) -> &[i8] {
        let area = self.rows.len().next_multiple_of(PAIR);
        &self.data[area * from + pair * steps * 2 * BYTE_TILE..][..steps * 2 * BYTE_TILE]
    }
}

/// Turns [`PAIR`] rows, `stride` apart, into right tiles.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn transpose_fours(amx: Amx, lines: &[i8], stride: usize, steps: usize, out: &mut [i8]) {
    assert!(lines.len() >= (PAIR - 1) * stride + steps * STEP && out.len() >= steps * 2 * BYTE_TILE);
    for step in 0..steps {
        for half in 0..2 {
            // SAFETY: 16 rows of 16 fours, inside both as checked above. Four bytes move as one f32; only their place
            // changes.
            unsafe {
                let from = lines.as_ptr().add(half * 16 * stride + step * STEP);
                let to = out.as_mut_ptr().add((step * 2 + half) * BYTE_TILE);
                amx.vectors().transpose(from.cast(), stride / 4, to.cast(), 16);
            }
        }
    }
}

/// Copies a block of up to [`PAIR`] weight rows into left tiles, zeros where there is nothing.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack_weight(weight: &Stack, rows: Range<usize>, columns: Range<usize>, out: &mut [i8]) {
    let steps = columns.len().div_ceil(STEP);
    let whole = columns.len() / STEP;
    let out = bytemuck::cast_slice_mut::<i8, u8>(out);
    for i in 0..PAIR {
        let bytes = match rows.start + i < rows.end {
            true => &weight.row(rows.start + i)[columns.clone()],
            false => &[],
        };
        for (step, tile) in out.chunks_exact_mut(2 * BYTE_TILE).take(steps).enumerate() {
            let to = &mut tile[STEP * i..STEP * (i + 1)];
            if bytes.is_empty() {
                to.fill(0);
            } else if step < whole {
                to.copy_from_slice(&bytes[STEP * step..STEP * (step + 1)]);
            } else {
                let rest = &bytes[STEP * step..];
                to[..rest.len()].copy_from_slice(rest);
                to[rest.len()..].fill(0);
            }
        }
    }
}

/// Writes a tile square of sums, token by token, `stride` apart.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn transpose_sums(amx: Amx, sums: &[i32], stride: usize, out: &mut [f32]) {
    assert!(sums.len() >= SUMS && stride >= PAIR && out.len() >= (PAIR - 1) * stride + PAIR);
    for tile in 0..4 {
        let (col, token) = (tile / 2 * 16, tile % 2 * 16);
        // SAFETY: a square of 16 × 16 inside both, as checked above; the bits only move.
        unsafe {
            let to = out.as_mut_ptr().add(token * stride + col);
            amx.vectors().transpose(sums.as_ptr().add(tile * 256).cast(), 16, to, stride);
        }
    }
}

/// A thread's own memory.
struct Scratch {
    weight: Buffer<i8>,
    /// Tiles of sums: for every pair of weight rows, for every pair of tokens.
    tiles: Buffer<i32>,
    /// [`PAIR`] tokens' sums of all columns.
    sums: Buffer<f32>,
    /// The right operands of the updates.
    panels: Buffer<f32>,
    /// The weight's scales.
    columns: Buffer<f32>,
}

/// Hands the product of all tokens in `left`, and the updates, to the sink.
pub(crate) fn product<R: Rows + Send, K: Sink>(
    cx: &Context,
    amx: Amx,
    left: &TokenTiles,
    weight: Int8<'_>,
    updates: &[Term<'_, R>],
    sink: &K,
) -> Result<()> {
    let blocks = Blocks { tile_rows: PAIR, rows: [TOKENS_AT_ONCE, 2 * PAIR], cols: [COLS_AT_ONCE, 2 * PAIR] };
    let cut = Cut::new(cx.pool.threads(), [left.rows.len(), weight.stack.rows], &blocks);
    let scratch = || {
        Ok(Scratch {
            weight: cx.buffer(PAIR * BLOCK)?,
            tiles: cx.buffer(cut.rows * cut.cols)?,
            sums: cx.buffer(PAIR * cut.cols)?,
            panels: cx.buffer(Updates::scratch(updates, cut.cols))?,
            columns: cx.buffer(cut.cols)?,
        })
    };
    cx.pool.each_with(cut.tasks, scratch, |task, scratch| {
        let (row, col) = (task % cut.strips * cut.rows, task / cut.strips * cut.cols);
        let rows = row..left.rows.len().min(row + cut.rows);
        let cols = col..weight.stack.rows.min(col + cut.cols);
        let mut tiles = amx.tiles();
        // SAFETY: the token proves AVX-512.
        unsafe { sum_tiles(&mut tiles, left, weight.stack, rows.clone(), cols.clone(), scratch) };
        drop(tiles);
        finish(cx, amx, left, weight, updates, (rows, cols), scratch, sink);
    })
}

/// Computes all sums of a task; `rows` counts from the first row of `left`.
///
/// # Safety
/// The machine has AVX-512 and AMX with int8.
unsafe fn sum_tiles(
    tiles: &mut Tiles,
    left: &TokenTiles,
    weight: &Stack,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: &mut Scratch,
) {
    let pairs = rows.start / PAIR..rows.end.div_ceil(PAIR);
    for from in (0..left.depth).step_by(BLOCK) {
        let columns = from..left.depth.min(from + BLOCK);
        let steps = columns.len().div_ceil(STEP);
        for (j, col) in cols.clone().step_by(PAIR).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { pack_weight(weight, col..cols.end, columns.clone(), &mut scratch.weight) };
            let ahead = if col + PAIR < cols.end { (col + PAIR, from) } else { (cols.start, columns.end) };
            for (i, pair) in pairs.clone().enumerate() {
                let sums = &mut scratch.tiles[(j * pairs.len() + i) * SUMS..][..SUMS];
                let line = |row: usize| match ahead.0 + row < cols.end && row < PAIR {
                    true => weight.row(ahead.0 + row).as_ptr().wrapping_add(ahead.1),
                    false => scratch.weight.as_ptr().cast(),
                };
                let b = left.tiles(from, steps, pair);
                let (a, add, next) = (scratch.weight.as_ptr(), from > 0, [line(2 * i), line(2 * i + 1)]);
                let pair = BytePair { a, b: b.as_ptr(), c: sums.as_mut_ptr(), steps, next, add };
                // SAFETY: two tiles a step in the packed weight and in b, four tiles of sums.
                unsafe { tiles.multiply_bytes(pair) };
            }
        }
    }
}

/// Turns the sums of a task round, makes floats of them, adds the updates and hands them on.
#[allow(clippy::too_many_arguments)]
fn finish<R: Rows, K: Sink>(
    cx: &Context,
    amx: Amx,
    left: &TokenTiles,
    weight: Int8<'_>,
    updates: &[Term<'_, R>],
    (rows, cols): (Range<usize>, Range<usize>),
    scratch: &mut Scratch,
    sink: &K,
) {
    let kind = Kind::of(cx.level);
    let width = cols.len().next_multiple_of(PAIR);
    let pairs = rows.len().div_ceil(PAIR);
    let columns = &mut scratch.columns[..width];
    columns[..cols.len()].copy_from_slice(&weight.scales[cols.clone()]);
    columns[cols.len()..].fill(0.0);
    let updates = Updates::pack(cx, updates, &cols, width, &mut scratch.panels);
    for (i, row) in rows.clone().step_by(PAIR).enumerate() {
        for j in 0..width / PAIR {
            let tiles = &scratch.tiles[(j * pairs + i) * SUMS..][..SUMS];
            // SAFETY: the token proves AVX-512.
            unsafe { transpose_sums(amx, tiles, width, &mut scratch.sums[j * PAIR..]) };
        }
        let mut about = [Quantised::default(); PAIR];
        for (about, &scale) in about.iter_mut().zip(&left.scales[row..row + PAIR]) {
            about.scale = scale;
        }
        scale(kind, &about, columns, false, width, &mut scratch.sums);
        let rows = left.rows.start + row..left.rows.start + rows.end.min(row + PAIR);
        updates.add(cx, &rows, width, &scratch.panels, &mut scratch.sums);
        emit(cx.level, sink, Finished { rows, cols: cols.clone(), sums: &scratch.sums, stride: width });
    }
}

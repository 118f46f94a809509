//! Products of bf16 activations and bf16 weights in AMX tiles.
//!
//! Computed as `yᵀ = W · xᵀ`: the weight, whose rows already lie as the left tile wants them, needs no transposing, and
//! only the activations are rearranged, once for all weight rows. A step multiplies 32 weight rows by 32 tokens over 32
//! columns. Columns are summed in blocks of [`BLOCK`], whose order is always the same.

use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::bf16;

use super::cut::{Blocks, Cut};
use super::product::Finished;
use super::tile_pack::{PAIR, STEP, SUMS, left_row, transpose_pairs};
use super::{DEPTH, Extent, Rows, Sink, Term, emit, multiply, pack_right};
use crate::Context;
use crate::buffer::Buffer;
use crate::element::convert;
use crate::parallel::Disjoint;
use crate::simd::{AHEAD, Amx, Pair, Simd, TILE, Tiles};
use crate::weight::{Format, Stack};

/// Columns summed in one go. The weight rows of a step (32 KiB) stay in the first-level cache while the tokens go by.
pub(super) const BLOCK: usize = 512;
/// Tokens that a thread works on at once. A block of their columns (512 KiB) stays in the second-level cache.
const TOKENS_AT_ONCE: usize = 512;
/// Weight rows that a thread works on at once; their sums (512 KiB) stay there too.
const COLS_AT_ONCE: usize = 256;

/// A bf16 matrix that can be read row by row, wherever its parts lie.
pub(crate) trait Halves: Sync {
    /// Copies the values of `row` from column `from` on.
    fn copy(&self, row: usize, from: usize, out: &mut [bf16]);
}

/// Activations as right tiles: for every block of columns, for every [`PAIR`] of tokens, two tiles a step.
pub(crate) struct TokenPanels {
    data: Buffer<bf16>,
    pub rows: Range<usize>,
    pub depth: usize,
}

impl TokenPanels {
    pub fn new(
        cx: &Context,
        amx: Amx,
        source: &impl Halves,
        rows: Range<usize>,
        depth: usize,
    ) -> Result<Self> {
        let (pairs, blocks) = (rows.len().div_ceil(PAIR), depth.div_ceil(BLOCK));
        let area = pairs.saturating_mul(PAIR);
        let mut data = cx.buffer(area.saturating_mul(depth.next_multiple_of(STEP)))?;
        let out = Disjoint::new(&mut data);
        let scratch = || cx.buffer::<bf16>(PAIR * BLOCK);
        cx.pool.each_with(pairs * blocks, scratch, |task, lines| {
            let (pair, from) = (task / blocks, task % blocks * BLOCK);
            let columns = BLOCK.min(depth - from);
            let steps = columns.div_ceil(STEP);
            for (i, line) in lines.chunks_exact_mut(BLOCK).enumerate() {
                let row = rows.start + pair * PAIR + i;
                let inside = if row < rows.end { columns } else { 0 };
                source.copy(row, from, &mut line[..inside]);
                line[inside..steps * STEP].fill(bf16::ZERO);
            }
            let at = area * from + pair * steps * 2 * TILE;
            // SAFETY: every task has tiles of its own.
            let out = unsafe { out.slice(at..at + steps * 2 * TILE) };
            // SAFETY: the token proves AVX-512.
            unsafe { transpose_pairs(amx, lines, BLOCK, steps, out) };
        })?;
        Ok(TokenPanels { data, rows, depth })
    }

    /// The bytes of these pairs of tokens in the block that begins at column `from`; none beyond the last one.
    fn block(&self, from: usize, pairs: Range<usize>) -> &[u8] {
        let per_pair = BLOCK.min(self.depth - from).div_ceil(STEP) * 2 * TILE;
        let area = self.rows.len().next_multiple_of(PAIR);
        bytemuck::cast_slice(&self.data[area * from + pairs.start * per_pair..][..pairs.len() * per_pair])
    }

    /// The tiles of the `pair`th [`PAIR`] of tokens in the block that begins at column `from`.
    pub(super) fn tiles(&self, from: usize, steps: usize, pair: usize) -> &[bf16] {
        let area = self.rows.len().next_multiple_of(PAIR);
        &self.data[area * from + pair * steps * 2 * TILE..][..steps * 2 * TILE]
    }
}

/// Copies a block of up to [`PAIR`] weight rows into left tiles, zeros where there is nothing.
///
/// Tiles could be loaded from the weight's own rows. But these lie apart by a multiple of a large power of two, where
/// the first-level cache can't hold 32 of them, and they are read once for every [`PAIR`] of tokens.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack_weight(amx: Amx, weight: &Stack, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
    if weight.format == Format::Packed {
        return unpack_weight(amx, weight, rows, columns, out);
    }
    let steps = columns.len().div_ceil(STEP);
    let whole = columns.len() / STEP;
    for i in 0..PAIR {
        let bytes = match rows.start + i < rows.end {
            true => &weight.row(rows.start + i)[2 * columns.start..2 * columns.end],
            false => &[],
        };
        let (line, out) = (bytemuck::cast_slice_mut::<bf16, u8>(out), 64 * i);
        for (step, tile) in line.chunks_exact_mut(4 * TILE).take(steps).enumerate() {
            let to = &mut tile[out..out + 64];
            if bytes.is_empty() {
                to.fill(0);
            } else if step < whole {
                to.copy_from_slice(&bytes[64 * step..64 * step + 64]);
            } else {
                let rest = &bytes[64 * step..];
                to[..rest.len()].copy_from_slice(rest);
                to[rest.len()..].fill(0);
            }
        }
    }
}

/// [`pack_weight`] for a packed weight, whose values are rounded to bf16.
#[inline(always)]
fn unpack_weight(amx: Amx, weight: &Stack, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
    let (mut wide, mut row) = ([0f32; BLOCK], [bf16::ZERO; BLOCK]);
    for i in 0..PAIR {
        let inside = if rows.start + i < rows.end { columns.len() } else { 0 };
        if inside > 0 {
            weight.unpack(rows.start + i, columns.start, &mut wide[..inside]);
            convert(amx.vectors(), &wide[..inside], &mut row[..inside]);
        }
        left_row(&row[..inside], i, columns.len().div_ceil(STEP), out);
    }
}

/// Writes a tile square of sums, token by token, `stride` apart.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn transpose_sums(amx: Amx, sums: &[f32], stride: usize, out: &mut [f32]) {
    assert!(sums.len() >= SUMS && stride >= PAIR && out.len() >= (PAIR - 1) * stride + PAIR);
    for tile in 0..4 {
        let (col, token) = (tile / 2 * 16, tile % 2 * 16);
        // SAFETY: a square of 16 × 16 inside both, as checked above.
        unsafe {
            let to = out.as_mut_ptr().add(token * stride + col);
            amx.vectors().transpose(sums.as_ptr().add(tile * 256), 16, to, stride);
        }
    }
}

/// A thread's own memory.
struct Scratch {
    weight: Buffer<bf16>,
    /// Tiles of sums: for every pair of weight rows, for every pair of tokens.
    tiles: Buffer<f32>,
    /// [`PAIR`] tokens' sums of all columns.
    sums: Buffer<f32>,
    /// The right operands of the updates.
    panels: Buffer<f32>,
}

/// Hands `left · weightᵀ + Σ update.left · update.rightᵀ` to the sink.
pub(crate) fn product_of_tiles<R: Rows + Send, K: Sink>(
    cx: &Context,
    amx: Amx,
    left: &TokenPanels,
    weight: &Stack,
    updates: &[Term<'_, R>],
    sink: &K,
) -> Result<()> {
    let blocks = Blocks { tile_rows: PAIR, rows: [TOKENS_AT_ONCE, 2 * PAIR], cols: [COLS_AT_ONCE, 2 * PAIR] };
    let cut = Cut::new(cx.pool.threads(), [left.rows.len(), weight.rows], &blocks);
    let updated: usize = updates.iter().map(|u| u.left.depth).sum();
    let scratch = || {
        Ok(Scratch {
            weight: cx.buffer(PAIR * BLOCK)?,
            tiles: cx.buffer(cut.rows * cut.cols)?,
            sums: cx.buffer(PAIR * cut.cols)?,
            panels: cx.buffer(updated * cut.cols)?,
        })
    };
    cx.pool.each_with(cut.tasks, scratch, |task, scratch| {
        let (row, col) = (task % cut.strips * cut.rows, task / cut.strips * cut.cols);
        let rows = row..left.rows.len().min(row + cut.rows);
        let cols = col..weight.rows.min(col + cut.cols);
        let mut tiles = amx.tiles();
        // SAFETY: the token proves AVX-512.
        unsafe { sum_tiles(amx, &mut tiles, left, weight, rows.clone(), cols.clone(), scratch) };
        drop(tiles);
        finish(cx, amx, left, updates, (rows, cols), scratch, sink);
    })
}

/// Computes all sums of a task; `rows` counts from the first row of `left`.
///
/// # Safety
/// The machine has AVX-512.
unsafe fn sum_tiles(
    amx: Amx,
    tiles: &mut Tiles,
    left: &TokenPanels,
    weight: &Stack,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: &mut Scratch,
) {
    let pairs = rows.start / PAIR..rows.end.div_ceil(PAIR);
    for from in (0..left.depth).step_by(BLOCK) {
        let columns = from..left.depth.min(from + BLOCK);
        let steps = columns.len().div_ceil(STEP);
        // The next block of these tokens, which is far away, comes while this one is worked on.
        let later = left.block(columns.end, pairs.clone());
        for (j, col) in cols.clone().step_by(PAIR).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { pack_weight(amx, weight, col..cols.end, columns.clone(), &mut scratch.weight) };
            let below = if col + PAIR < cols.end { (col + PAIR, from) } else { (cols.start, columns.end) };
            for (i, pair) in pairs.clone().enumerate() {
                let turn = j * pairs.len() + i;
                let ahead = later.get(turn * BLOCK / STEP * AHEAD..).unwrap_or_default().as_ptr();
                let sums = &mut scratch.tiles[turn * SUMS..][..SUMS];
                // Packed rows are read much faster than unpacked: there is nothing to fetch ahead.
                let ahead_of = |row| weight.format == Format::BF16 && below.0 + row < cols.end && row < PAIR;
                let line = |row: usize| match ahead_of(row) {
                    true => weight.row(below.0 + row).as_ptr().wrapping_add(2 * below.1),
                    false => scratch.weight.as_ptr().cast(),
                };
                let b = left.tiles(from, steps, pair);
                let (a, add, next) = (scratch.weight.as_ptr(), from > 0, [line(2 * i), line(2 * i + 1)]);
                let pair = Pair { a, b: b.as_ptr(), c: sums.as_mut_ptr(), steps, next, ahead, add };
                // SAFETY: two tiles a step in the packed weight and in b, four tiles of sums.
                unsafe { tiles.multiply(pair) };
            }
        }
    }
}

/// Turns the sums of a task round, adds the updates and hands them on.
fn finish<R: Rows, K: Sink>(
    cx: &Context,
    amx: Amx,
    left: &TokenPanels,
    updates: &[Term<'_, R>],
    (rows, cols): (Range<usize>, Range<usize>),
    scratch: &mut Scratch,
    sink: &K,
) {
    let width = cols.len().next_multiple_of(PAIR);
    let (panels, pairs) = (width / cx.level.tile_cols(), rows.len().div_ceil(PAIR));
    let updates = || updates.iter().filter(|u| u.cols.start < cols.end && cols.start < u.cols.end);
    let mut at = 0;
    for update in updates() {
        for from in (0..update.left.depth).step_by(DEPTH) {
            let depth = DEPTH.min(update.left.depth - from);
            pack_right(
                cx.level,
                &update.right,
                cols.start,
                from,
                depth,
                &mut scratch.panels[at..][..width * depth],
            );
            at += width * depth;
        }
    }
    for (i, row) in rows.clone().step_by(PAIR).enumerate() {
        for j in 0..width / PAIR {
            let tiles = &scratch.tiles[(j * pairs + i) * SUMS..][..SUMS];
            // SAFETY: the token proves AVX-512.
            unsafe { transpose_sums(amx, tiles, width, &mut scratch.sums[j * PAIR..]) };
        }
        let rows = left.rows.start + row..left.rows.start + rows.end.min(row + PAIR);
        let mut at = 0;
        for update in updates() {
            for (_, depth, left) in update.left.blocks(rows.clone()) {
                let size = Extent { rows: rows.len(), panels, depth, stride: width };
                multiply(
                    cx.level,
                    size,
                    left,
                    &scratch.panels[at..][..width * depth],
                    &mut scratch.sums,
                    true,
                );
                at += width * depth;
            }
        }
        emit(cx.level, sink, Finished { rows, cols: cols.clone(), sums: &scratch.sums, stride: width });
    }
}

//! Linear layers in tiles.
//!
//! Computed as `yᵀ = W · xᵀ`: the weight, whose rows already lie as the left tile wants them, needs no transposing, and
//! only the activations are rearranged, once for all weight rows. A step multiplies 32 weight rows by 32 tokens over 64
//! bytes of each. These are summed in one order, whatever the blocks.

use std::ops::Range;

use kiln_ops::Result;

use super::pack::{LINE, PAIR, SUMS, left_tiles};
use super::panels::{BLOCK, Panels};
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::cut::{Blocks, Cut};
use crate::gemm::{Finished, Rows, Sink, Term, Updates, emit};
use crate::simd::{AHEAD, Amx, Fetch, Pair, Simd, TILE_BYTES, Tiles};
use crate::weight::{Format, Stack};

/// Tokens that a thread works on at once. A block of their columns (512 KiB) stays in the second-level cache.
const TOKENS_AT_ONCE: usize = 512;
/// Weight rows that a thread works on at once; their sums (512 KiB) stay there too.
const COLS_AT_ONCE: usize = 256;

/// `left · weightᵀ + Σ update.left · update.rightᵀ`.
pub(crate) struct TileProduct<'a, R> {
    pub cx: &'a Context,
    pub amx: Amx,
    /// In the weight's format.
    pub left: &'a Panels,
    /// Of bf16 or of bytes.
    pub weight: &'a Stack,
    /// For bytes the scale of each weight row.
    pub scales: &'a [f32],
    pub updates: &'a [Term<'a, R>],
}

/// A thread's own memory.
struct Scratch {
    weight: Buffer<u8>,
    /// Tiles of sums: for every pair of weight rows, for every pair of tokens.
    tiles: Buffer<f32>,
    /// [`PAIR`] tokens' sums of all columns.
    sums: Buffer<f32>,
    /// The right operands of the updates.
    panels: Buffer<f32>,
    /// The weight's scales.
    columns: Buffer<f32>,
}

impl<R: Rows + Send> TileProduct<'_, R> {
    /// Hands all rows of `left` to the sink.
    pub fn run<K: Sink>(&self, sink: &K) -> Result<()> {
        let TileProduct { cx, left, weight, .. } = *self;
        let blocks =
            Blocks { tile_rows: PAIR, rows: [TOKENS_AT_ONCE, 2 * PAIR], cols: [COLS_AT_ONCE, 2 * PAIR] };
        let cut = Cut::new(cx.pool.threads(), [left.rows.len(), weight.rows], &blocks);
        let scratch = || {
            Ok(Scratch {
                weight: cx.buffer(PAIR * BLOCK)?,
                tiles: cx.buffer(cut.rows * cut.cols)?,
                sums: cx.buffer(PAIR * cut.cols)?,
                panels: cx.buffer(Updates::scratch(self.updates, cut.cols))?,
                columns: cx.buffer(cut.cols)?,
            })
        };
        cx.pool.each_with(cut.tasks, scratch, |task, scratch| {
            let (row, col) = (task % cut.strips * cut.rows, task / cut.strips * cut.cols);
            let rows = row..left.rows.len().min(row + cut.rows);
            let cols = col..weight.rows.min(col + cut.cols);
            let mut tiles = self.amx.tiles();
            self.sum(&mut tiles, rows.clone(), cols.clone(), scratch, sink);
            drop(tiles);
            self.finish(rows, cols, scratch, sink);
        })
    }

    /// Computes all sums of a task; `rows` counts from the first row of `left`.
    fn sum<K: Sink>(
        &self,
        tiles: &mut Tiles,
        rows: Range<usize>,
        cols: Range<usize>,
        scratch: &mut Scratch,
        sink: &K,
    ) {
        let TileProduct { left, weight, .. } = *self;
        let pairs = rows.start / PAIR..rows.end.div_ceil(PAIR);
        for from in (0..left.depth).step_by(BLOCK) {
            let columns = from..left.depth.min(from + BLOCK);
            let steps = columns.len().div_ceil(LINE);
            // The next block of these tokens, which is far away, comes while this one is worked on.
            let later = left.block(columns.end, pairs.clone());
            for (j, col) in cols.clone().step_by(PAIR).enumerate() {
                // SAFETY: the token proves AVX-512.
                unsafe { left_tiles(weight, col..cols.end, columns.clone(), &mut scratch.weight) };
                let below =
                    if col + PAIR < cols.end { (col + PAIR, from) } else { (cols.start, columns.end) };
                for (i, pair) in pairs.clone().enumerate() {
                    let turn = j * pairs.len() + i;
                    let line = |row: usize| match below.0 + row < cols.end && row < PAIR {
                        true => weight.row(below.0 + row).as_ptr().wrapping_add(below.1),
                        false => scratch.weight.as_ptr(),
                    };
                    if later.is_empty() {
                        let first = left.rows.start + pair * PAIR;
                        let rows = first..left.rows.end.min(first + PAIR);
                        sink.near(rows, col..cols.end.min(col + PAIR));
                    }
                    let ahead = later.get(turn * BLOCK / LINE * AHEAD..).unwrap_or_default();
                    let fetch = Fetch { next: [line(2 * i), line(2 * i + 1)], ahead: ahead.as_ptr() };
                    let sums = &mut scratch.tiles[turn * SUMS..][..SUMS];
                    let operands = Pair {
                        a: scratch.weight.as_ptr(),
                        b: left.tiles(from, pair).as_ptr(),
                        c: sums.as_mut_ptr().cast(),
                        steps,
                        add: from > 0,
                    };
                    // SAFETY: two tiles a step in the packed weight and in b, four tiles of sums; bytes are given only
                    // where tiles multiply them.
                    unsafe {
                        match weight.format {
                            Format::I8 => tiles.multiply_bytes(operands, fetch),
                            _ => tiles.multiply_halves(operands, fetch),
                        }
                    }
                }
            }
        }
    }

    /// Turns the sums of a task round, makes floats of them, adds the updates and hands them on.
    fn finish<K: Sink>(&self, rows: Range<usize>, cols: Range<usize>, scratch: &mut Scratch, sink: &K) {
        let TileProduct { cx, amx, left, .. } = *self;
        let width = cols.len().next_multiple_of(PAIR);
        let pairs = rows.len().div_ceil(PAIR);
        let columns = &mut scratch.columns[..width];
        if left.scales.is_some() {
            columns[..cols.len()].copy_from_slice(&self.scales[cols.clone()]);
            columns[cols.len()..].fill(0.0);
        }
        let updates = Updates::pack(cx, self.updates, &cols, width, &mut scratch.panels);
        for (i, row) in rows.clone().step_by(PAIR).enumerate() {
            let tokens = left.scales.as_ref().map(|scales| &scales[row..row + PAIR]);
            for j in 0..width / PAIR {
                let tiles = &scratch.tiles[(j * pairs + i) * SUMS..][..SUMS];
                let sums = &mut scratch.sums[j * PAIR..];
                let scales = tokens.map(|tokens| [tokens, &columns[j * PAIR..][..PAIR]]);
                // SAFETY: the token proves AVX-512.
                unsafe { turn(amx, tiles, scales, width, sums) };
            }
            let rows = left.rows.start + row..left.rows.start + rows.end.min(row + PAIR);
            updates.add(cx, &rows, width, &scratch.panels, &mut scratch.sums);
            emit(cx.level, sink, Finished { rows, cols: cols.clone(), sums: &scratch.sums, stride: width });
        }
    }
}

/// Writes a square of sums, token by token, `stride` apart. Sums of bytes become floats, times the scales of tokens and
/// columns.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn turn(amx: Amx, tiles: &[f32], scales: Option<[&[f32]; 2]>, stride: usize, out: &mut [f32]) {
    use std::arch::x86_64::*;
    assert!(tiles.len() >= SUMS && stride >= PAIR && out.len() >= (PAIR - 1) * stride + PAIR);
    for tile in 0..4 {
        let (col, token) = (tile / 2 * 16, tile % 2 * 16);
        // SAFETY: a square of 16 × 16 inside both, as checked above; the bits only move.
        unsafe {
            let to = out.as_mut_ptr().add(token * stride + col);
            amx.vectors().transpose(tiles.as_ptr().add(tile * TILE_BYTES / 4), 16, to, stride);
        }
        let Some([tokens, columns]) = scales else { continue };
        // SAFETY: the same square; 16 columns are looked for.
        unsafe {
            let columns = _mm512_loadu_ps(columns[col..col + 16].as_ptr());
            for (i, &scale) in tokens[token..token + 16].iter().enumerate() {
                let at = out.as_mut_ptr().add((token + i) * stride + col);
                let sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(at.cast()));
                let scaled = _mm512_mul_ps(_mm512_mul_ps(sums, _mm512_set1_ps(scale)), columns);
                _mm512_storeu_ps(at, scaled);
            }
        }
    }
}

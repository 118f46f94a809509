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
    /// In the weight's format, bf16 for a packed one.
    pub left: &'a Panels,
    /// Of bf16, of bytes, or packed.
    pub weight: &'a Stack,
    /// For bytes the scale of each weight row.
    pub scales: &'a [f32],
    pub updates: &'a [Term<'a, R>],
}

/// Rows, counted from the first of the left operand, and columns of a task.
struct Area {
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Area {
    fn pairs(&self) -> Range<usize> {
        self.rows.start / PAIR..self.rows.end.div_ceil(PAIR)
    }
}

/// Bands of columns that all strips of rows go through before the next ones, so that their weights come from memory
/// once, and that one task's tokens are mostly the next one's.
const BANDS_AT_ONCE: usize = 4;

/// The order of tasks.
struct Order<'a> {
    cut: &'a Cut,
    size: [usize; 2],
    bands: usize,
}

impl<'a> Order<'a> {
    fn new(cut: &'a Cut, size: [usize; 2]) -> Order<'a> {
        Order { cut, size, bands: size[1].div_ceil(cut.cols) }
    }

    fn area(&self, task: usize) -> Area {
        let Cut { rows, cols, strips, .. } = *self.cut;
        let first = task / (strips * BANDS_AT_ONCE) * BANDS_AT_ONCE;
        let (bands, task) = (BANDS_AT_ONCE.min(self.bands - first), task - first * strips);
        let (row, col) = (task / bands * rows, (first + task % bands) * cols);
        Area { rows: row..self.size[0].min(row + rows), cols: col..self.size[1].min(col + cols) }
    }
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
        let order = Order::new(&cut, [left.rows.len(), weight.rows]);
        cx.pool.each_with(cut.tasks, scratch, |task, scratch| {
            // The task that this thread most likely takes next.
            let next = order.area((task + cx.pool.threads()).min(cut.tasks - 1));
            let area = order.area(task);
            let mut tiles = self.amx.tiles();
            self.sum(&mut tiles, &area, &next, scratch);
            drop(tiles);
            self.finish(area, scratch, sink);
        })
    }

    /// Computes all sums of a task.
    fn sum(&self, tiles: &mut Tiles, area: &Area, next: &Area, scratch: &mut Scratch) {
        let TileProduct { left, weight, .. } = *self;
        let cols = &area.cols;
        let pairs = area.pairs();
        for from in (0..left.depth).step_by(BLOCK) {
            let columns = from..left.depth.min(from + BLOCK);
            let steps = columns.len().div_ceil(LINE);
            let last = columns.end == left.depth;
            // The next block of these tokens, which is far away, comes while this one is worked on.
            let later = match last {
                false => left.block(columns.end, pairs.clone()),
                true => left.block(0, next.pairs()),
            };
            for (j, col) in cols.clone().step_by(PAIR).enumerate() {
                // SAFETY: the token proves AVX-512.
                unsafe { left_tiles(self.amx, weight, col..cols.end, columns.clone(), &mut scratch.weight) };
                let below = match (col + PAIR < cols.end, last) {
                    (true, _) => (col + PAIR..cols.end, from),
                    (false, false) => (cols.clone(), columns.end),
                    (false, true) => (next.cols.clone(), 0),
                };
                for (i, pair) in pairs.clone().enumerate() {
                    let turn = j * pairs.len() + i;
                    // Packed rows are read much faster than unpacked: there is nothing to fetch ahead.
                    let dense = weight.format != Format::Packed;
                    let line = |row: usize| match dense && below.0.start + row < below.0.end && row < PAIR {
                        true => weight.row(below.0.start + row).as_ptr().wrapping_add(below.1),
                        false => scratch.weight.as_ptr(),
                    };
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
    fn finish<K: Sink>(&self, Area { rows, cols }: Area, scratch: &mut Scratch, sink: &K) {
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
        // SAFETY: a square of 16 × 16 inside both, as checked above; 16 scales are looked for.
        unsafe {
            let (from, to) = (&tiles[tile * TILE_BYTES / 4..], out.as_mut_ptr().add(token * stride + col));
            let Some([tokens, columns]) = scales else {
                amx.vectors().transpose(from.as_ptr(), 16, to, stride);
                continue;
            };
            let tokens = _mm512_loadu_ps(tokens[token..token + 16].as_ptr());
            let mut square = [_mm512_setzero_ps(); 16];
            for (i, (row, &scale)) in square.iter_mut().zip(&columns[col..col + 16]).enumerate() {
                let sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(from.as_ptr().add(i * 16).cast()));
                *row = _mm512_mul_ps(_mm512_mul_ps(sums, tokens), _mm512_set1_ps(scale));
            }
            for (i, line) in amx.vectors().transposed(square).into_iter().enumerate() {
                _mm512_storeu_ps(to.add(i * stride), line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_belongs_to_one_task() {
        for size in [[1, 1], [70, 40], [700, 2700], [1536, 3072], [64, 5000]] {
            let blocks = Blocks { tile_rows: PAIR, rows: [512, 64], cols: [256, 64] };
            let cut = Cut::new(2, size, &blocks);
            let order = Order::new(&cut, size);
            let mut seen = vec![0; size[0] * size[1]];
            for task in 0..cut.tasks {
                let Area { rows, cols } = order.area(task);
                rows.for_each(|row| seen[row * size[1]..][cols.clone()].iter_mut().for_each(|n| *n += 1));
            }
            assert!(seen.iter().all(|&n| n == 1), "{size:?}");
        }
    }
}

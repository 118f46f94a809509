//! Linear layers in tiles.
//!
//! Computed as `yᵀ = W · xᵀ`: the weight, whose rows already lie as the left tile wants them, needs no transposing, and
//! only the activations are rearranged, once for all weight rows. A step multiplies 32 weight rows by 32 tokens over 64
//! bytes of each. These are summed in one order, whatever the blocks.

use std::ops::Range;

use kiln_ops::Result;

use super::pack::{LINE, PAIR, SUMS, left_tiles};
use super::panels::{BLOCK, Panels};
use super::turn::turn;
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::cut::{Blocks, Cut};
use crate::gemm::{Finished, Rows, Sink, Term, Updates, emit};
use crate::simd::{Amx, Left, OfBytes, OfHalves, Pair, Tiles};
use crate::weight::{Format, Stack};

/// Tokens that a thread works on at once. A block of their columns (384 KiB) stays in the second-level cache, and so
/// does the next one.
const TOKENS_AT_ONCE: usize = 384;
/// Weight rows that a thread works on at once; their sums (384 KiB) stay there too.
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

/// What comes into the second-level cache during a product.
struct Fetch<'a> {
    /// Weight rows that are to be read soon, and their distance.
    rows: Option<(&'a [u8], usize)>,
    /// Which of them this product's turn is.
    turn: Range<usize>,
    /// Tiles that are to be read later.
    ahead: &'a [u8],
}

impl Fetch<'_> {
    /// Bytes of the tiles ahead that a step asks for.
    const AHEAD: usize = 256;

    #[inline(always)]
    fn step(&self, step: usize) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let ask = |p: *const u8, offset: usize| {
            // SAFETY: asking for memory never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(offset).cast()) };
        };
        if let Some((rows, stride)) = self.rows {
            self.turn.clone().for_each(|row| ask(rows.as_ptr(), row * stride + step * LINE));
        }
        for offset in (0..Self::AHEAD).step_by(LINE) {
            ask(self.ahead.as_ptr(), step * Self::AHEAD + offset);
        }
    }
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
        let (cols, pairs) = (&area.cols, area.pairs());
        for from in (0..left.depth).step_by(BLOCK) {
            let block = from..left.depth.min(from + BLOCK);
            let last = block.end == left.depth;
            // The next block of these tokens, which is far away, comes while this one is worked on.
            let later = match last {
                false => left.block(block.end, pairs.clone()),
                true => left.block(0, next.pairs()),
            };
            for (j, col) in cols.clone().step_by(PAIR).enumerate() {
                let in_place = self.in_place(col..cols.end, block.clone());
                if in_place.is_none() {
                    let out = &mut scratch.weight;
                    // SAFETY: the token proves AVX-512.
                    unsafe { left_tiles(self.amx, weight, col..cols.end, block.clone(), out) };
                }
                let rows = match (col + PAIR < cols.end, last) {
                    (true, _) => self.in_place(col + PAIR..cols.end, block.clone()),
                    (false, false) => self.in_place(cols.clone(), block.end..left.depth),
                    (false, true) => self.in_place(next.cols.clone(), 0..left.depth),
                };
                for (i, pair) in pairs.clone().enumerate() {
                    let turn = j * pairs.len() + i;
                    let ahead = later.get(turn * BLOCK / LINE * Fetch::AHEAD..).unwrap_or_default();
                    let share = |i: usize| i * PAIR / pairs.len();
                    let fetch = Fetch { rows, turn: share(i)..share(i + 1), ahead };
                    let to = scratch.weight.as_mut_ptr();
                    let a = match in_place {
                        // The first product copies the rows into tiles for the others.
                        Some((rows, stride)) if i == 0 => {
                            Left::Rows { first: rows.as_ptr(), stride, tiles: to }
                        }
                        _ => Left::Tiles(to),
                    };
                    let operands = Pair {
                        a,
                        b: left.tiles(from, pair).as_ptr(),
                        c: scratch.tiles[turn * SUMS..][..SUMS].as_mut_ptr().cast(),
                        steps: block.len().div_ceil(LINE),
                        add: from > 0,
                    };
                    // SAFETY: two tiles a step in the packed weight and in b, or rows of as many bytes; four tiles of
                    // sums; bytes are given only where tiles multiply them.
                    unsafe {
                        match weight.format {
                            Format::I8 => tiles.multiply::<OfBytes>(operands, |step| fetch.step(step)),
                            _ => tiles.multiply::<OfHalves>(operands, |step| fetch.step(step)),
                        }
                    }
                }
            }
        }
    }

    /// Turns the sums of a task round, makes floats of them, adds the updates and hands them on.
    fn finish<K: Sink>(&self, Area { rows, cols }: Area, scratch: &mut Scratch, sink: &K) {
        let TileProduct { cx, left, .. } = *self;
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
                let square = &scratch.tiles[(j * pairs + i) * SUMS..][..SUMS];
                let scales = tokens.map(|tokens| [tokens, &columns[j * PAIR..][..PAIR]]);
                // SAFETY: the token proves AVX-512.
                unsafe { turn(square, scales, width, &mut scratch.sums[j * PAIR..]) };
            }
            let rows = left.rows.start + row..left.rows.start + rows.end.min(row + PAIR);
            updates.add(cx, &rows, width, &scratch.panels, &mut scratch.sums);
            emit(cx.level, sink, Finished { rows, cols: cols.clone(), sums: &scratch.sums, stride: width });
        }
    }

    /// Bytes `columns` of the first [`PAIR`] of some weight rows, and how far these are apart, if tiles can be loaded from
    /// there: where all rows and whole lines of them are there.
    fn in_place(&self, rows: Range<usize>, columns: Range<usize>) -> Option<(&[u8], usize)> {
        if self.weight.format == Format::Packed || rows.len() < PAIR || !columns.len().is_multiple_of(LINE) {
            return None;
        }
        let (bytes, stride) = self.weight.rows_in_place(rows.start..rows.start + PAIR)?;
        Some((&bytes[columns.start..], stride))
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

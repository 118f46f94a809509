//! Linear layers in tiles.
//!
//! Computed as `yᵀ = W · xᵀ`: the weight, whose rows already lie as the left tile wants them, needs no transposing, and
//! only the activations are rearranged, once for all weight rows. A step multiplies 32 weight rows by 32 tokens over 64
//! bytes of each. These are summed in one order, whatever the blocks. Integers, which lie as tiles, go through
//! [`bytes`](super::bytes).

use std::ops::Range;

use kiln_ops::Result;

use super::order::{Area, Fetch, Order};
use super::pack::{LINE, PAIR, SUMS, left_tiles};
use super::panels::{BLOCK, Panels};
use super::turn::turn;
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::{Finished, Rows, Sink, Term, Updates, emit};
use crate::simd::{Amx, Left, OfHalves, Pair, Tiles};
use crate::weight::{Format, Stack};

/// `left · weightᵀ + Σ update.left · update.rightᵀ`.
pub(crate) struct TileProduct<'a, R> {
    pub cx: &'a Context,
    pub amx: Amx,
    /// Right tiles of bf16.
    pub left: &'a Panels,
    /// Of bf16, or packed.
    pub weight: &'a Stack,
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
}

impl<R: Rows + Send> TileProduct<'_, R> {
    /// Hands all rows of `left` to the sink.
    pub fn run<K: Sink>(&self, sink: &K) -> Result<()> {
        let TileProduct { cx, left, weight, .. } = *self;
        let order = Order::new(cx.pool.threads(), [left.rows.len(), weight.rows]);
        let cut = &order.cut;
        let scratch = || {
            Ok(Scratch {
                weight: cx.buffer(PAIR * BLOCK)?,
                tiles: cx.buffer(cut.rows * cut.cols)?,
                sums: cx.buffer(PAIR * cut.cols)?,
                panels: cx.buffer(Updates::scratch(self.updates, cut.cols))?,
            })
        };
        cx.pool.each_with(cut.tasks, scratch, |task, scratch| {
            // The task that this thread most likely takes next.
            let next = order.area((task + cx.pool.threads()).min(cut.tasks - 1));
            let area = order.area(task);
            let mut tiles = self.amx.tiles();
            self.sum(&mut tiles, &area, &next, scratch);
            drop(tiles);
            self.finish(area, scratch, sink);
            // What the sink wrote past the caches is to be seen by all before this task is over.
            // SAFETY: every machine with tiles has this.
            unsafe { std::arch::x86_64::_mm_sfence() };
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
                    // sums.
                    unsafe { tiles.multiply::<OfHalves>(operands, |step| fetch.step(step)) };
                }
            }
        }
    }

    /// Turns the sums of a task round, adds the updates and hands them on.
    fn finish<K: Sink>(&self, Area { rows, cols }: Area, scratch: &mut Scratch, sink: &K) {
        let TileProduct { cx, left, .. } = *self;
        let width = cols.len().next_multiple_of(PAIR);
        let pairs = rows.len().div_ceil(PAIR);
        let updates = Updates::pack(cx, self.updates, &cols, width, &mut scratch.panels);
        for (i, row) in rows.clone().step_by(PAIR).enumerate() {
            for j in 0..width / PAIR {
                let square = &scratch.tiles[(j * pairs + i) * SUMS..][..SUMS];
                // SAFETY: the token proves AVX-512.
                unsafe { turn(square, width, &mut scratch.sums[j * PAIR..]) };
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

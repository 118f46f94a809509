//! Linear layers of bytes in tiles: tokens are left tiles, the weight already lies as right ones.

use std::arch::x86_64::*;
use std::ops::Range;

use kiln_ops::Result;

use super::beside::{AT_ONCE, Square};
use super::order::{Area, Order};
use super::pack::{LINE, PAIR, SUMS};
use super::panels::{BLOCK, Panels};
use super::turned::Turned;
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::{Finished, Plain, Rows, Sink, Term, Updates, emit};
use crate::simd::{Amx, Left, OfBytes, Pair, Tiles};

const _: () = assert!(BLOCK / LINE * AT_ONCE <= PAIR);

/// Tokens whose sums are handed on at once: they stay in the first-level cache on the way.
const TOKENS: usize = 16;

/// `left · weightᵀ + Σ update.left · update.rightᵀ`.
pub(crate) struct ByteProduct<'a, R> {
    pub cx: &'a Context,
    pub amx: Amx,
    /// Left tiles of bytes.
    pub left: &'a Panels,
    pub weight: &'a Turned,
    /// The scale of each weight row.
    pub scales: &'a [f32],
    pub updates: &'a [Term<'a, R>],
}

/// A thread's own memory.
struct Scratch {
    /// Squares of sums: for every pair of columns, for every pair of tokens.
    tiles: Buffer<f32>,
    /// [`TOKENS`] tokens' sums of all columns.
    sums: Buffer<f32>,
    /// The right operands of the updates.
    panels: Buffer<f32>,
    /// The weight's scales.
    columns: Buffer<f32>,
    /// The tokens of the task before.
    near: Range<usize>,
}

/// What comes into the second-level cache during a product.
struct Fetch<'a> {
    /// Weights that are to be read soon.
    soon: &'a [u8],
    /// Tokens that are to be read later.
    ahead: &'a [u8],
}

impl Fetch<'_> {
    /// Lines that are asked for in a step: a number known to the compiler, so that nothing but the asking is left of it.
    const LINES: usize = 4;

    #[inline(always)]
    fn step(&self, step: usize) {
        if !self.soon.is_empty() {
            ask(self.soon, step);
        }
        if !self.ahead.is_empty() {
            ask(self.ahead, step);
        }
    }
}

/// Asks for the `i`th [`Fetch::LINES`].
#[inline(always)]
fn ask(from: &[u8], i: usize) {
    for line in i * Fetch::LINES..(i + 1) * Fetch::LINES {
        // SAFETY: asking for memory never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.as_ptr().wrapping_add(line * LINE).cast()) };
    }
}

impl<R: Rows + Send> ByteProduct<'_, R> {
    /// Hands all rows of `left` to the sink.
    pub fn run<K: Sink>(&self, sink: &K) -> Result<()> {
        let ByteProduct { cx, left, .. } = *self;
        let order = Order::of_bytes(cx.pool.threads(), [left.rows.len(), self.scales.len()], left.depth);
        let cut = &order.cut;
        let scratch = || {
            Ok(Scratch {
                tiles: cx.buffer(cut.rows * cut.cols)?,
                sums: cx.buffer(TOKENS * cut.cols)?,
                panels: cx.buffer(Updates::scratch(self.updates, cut.cols))?,
                columns: cx.buffer(cut.cols)?,
                near: 0..0,
            })
        };
        cx.pool.each_with(cut.tasks, scratch, |task, scratch| {
            // The task that this thread most likely takes next.
            let next = order.area((task + cx.pool.threads()).min(cut.tasks - 1));
            let area = order.area(task);
            let stay = [order.near && scratch.near == area.rows, order.near && next.rows == area.rows];
            scratch.near = area.rows.clone();
            let mut tiles = self.amx.tiles();
            // SAFETY: the token proves AVX-512.
            let written = unsafe { self.sum(&mut tiles, [&area, &next], stay, scratch, sink) };
            drop(tiles);
            if !written {
                self.finish(area, scratch, sink);
            }
            // What was written past the caches is to be seen by all before this task is over.
            // SAFETY: every machine with tiles has this.
            unsafe { _mm_sfence() };
        })
    }

    /// Computes all sums of a task and, if the sink can say where they go, writes them, those of one product while the tiles
    /// are at the next one; tells if it did. `stay` says whether the tokens are near since the task before, and whether they
    /// are the next one's.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn sum<K: Sink>(
        &self,
        tiles: &mut Tiles,
        [area, next]: [&Area; 2],
        stay: [bool; 2],
        scratch: &mut Scratch,
        sink: &K,
    ) -> bool {
        let s = self.amx.vectors();
        let beside = self.places(area, sink);
        let mut done: Option<Square> = None;
        let ByteProduct { left, weight, .. } = *self;
        let (tokens, cols) = (area.pairs(), area.cols.start / PAIR..area.cols.end.div_ceil(PAIR));
        // Lines of the weight that a product's steps ask for, and those that have to be asked for before it, where tokens are
        // too few for all to be asked for beside their products.
        let share = (PAIR / Fetch::LINES).div_ceil(tokens.len());
        for from in (0..left.depth).step_by(BLOCK) {
            let end = left.depth.min(from + BLOCK);
            let steps = (end - from).div_ceil(LINE);
            let last = end == left.depth;
            // The next block of these tokens, which may be far away, comes while this one is worked on.
            let later = match (last, stay) {
                (false, [true, _]) | (true, [_, true]) => &[],
                (false, _) => left.block(end, tokens.clone()),
                (true, _) => left.block(0, next.pairs()),
            };
            for (j, col) in cols.clone().enumerate() {
                let right = weight.tiles(col, from);
                let soon = match (col + 1 < cols.end, last) {
                    (true, _) => weight.tiles(col + 1, from),
                    (false, false) => weight.tiles(cols.start, end),
                    (false, true) => weight.tiles(next.cols.start / PAIR, 0),
                };
                for (i, pair) in tokens.clone().enumerate() {
                    let turn = j * tokens.len() + i;
                    let lines = |i: usize| i * steps * Fetch::LINES * LINE;
                    let soon = soon.get(lines(i * share)..lines(PAIR / Fetch::LINES)).unwrap_or_default();
                    (steps..steps * share).for_each(|i| ask(soon, i));
                    let fetch = Fetch { soon, ahead: later.get(lines(turn)..).unwrap_or_default() };
                    let operands = Pair {
                        a: Left::Tiles(left.tiles(from, pair).as_ptr()),
                        b: right.as_ptr(),
                        c: scratch.tiles[turn * SUMS..][..SUMS].as_mut_ptr().cast(),
                        steps,
                        add: from > 0,
                    };
                    let square = match last {
                        true => beside.get(turn).map(|&place| self.square(&operands, place, [pair, col])),
                        false => None,
                    };
                    // SAFETY: two tiles a step in both operands, four tiles of sums; a weight is turned only where tiles
                    // multiply bytes. The square before is finished, and a block has no more steps than that has rows to
                    // write.
                    unsafe {
                        match (&square, &done) {
                            (Some(square), Some(done)) if square.place.onto.is_some() => tiles
                                .multiply::<OfBytes>(operands, |step| {
                                    fetch.step(step);
                                    square.ask(step * AT_ONCE);
                                    done.write::<true>(s, step * AT_ONCE);
                                }),
                            (Some(_), Some(done)) => tiles.multiply::<OfBytes>(operands, |step| {
                                fetch.step(step);
                                done.write::<false>(s, step * AT_ONCE);
                            }),
                            _ => tiles.multiply::<OfBytes>(operands, |step| fetch.step(step)),
                        }
                        if let Some(done) = &done {
                            done.write_rest(s, steps * AT_ONCE);
                        }
                    }
                    done = square;
                }
            }
        }
        if let Some(done) = &done {
            // SAFETY: the last square is finished.
            unsafe { done.write_rest(s, 0) };
        }
        done.is_some()
    }

    /// Where the squares of a task go, if that can be said of all of them and nothing is to be added.
    fn places<K: Sink>(&self, area: &Area, sink: &K) -> Vec<Plain> {
        if !self.updates.is_empty() || !area.rows.len().is_multiple_of(PAIR) {
            return Vec::new();
        }
        let start = self.left.rows.start;
        let rows = |pair: usize| start + pair * PAIR..start + (pair + 1) * PAIR;
        let squares =
            area.cols.clone().step_by(PAIR).flat_map(|col| area.pairs().map(move |pair| (pair, col)));
        let place = |(pair, col): (usize, usize)| match col + PAIR <= area.cols.end {
            true => sink.plain(rows(pair), col..col + PAIR),
            false => None,
        };
        squares.map(place).collect::<Option<_>>().unwrap_or_default()
    }

    /// The square that a product makes of these pairs of tokens and columns.
    fn square(&self, product: &Pair, place: Plain, [pair, col]: [usize; 2]) -> Square {
        let about = self.left.scales.as_deref().unwrap_or_default();
        let [tokens, columns] =
            [&about[pair * PAIR..][..PAIR], &self.scales[col * PAIR..][..PAIR]].map(|x| x.as_ptr());
        Square { sums: product.c.cast(), tokens, columns, place }
    }

    /// Makes floats of the sums of a task, adds the updates and hands them on.
    fn finish<K: Sink>(&self, Area { rows, cols }: Area, scratch: &mut Scratch, sink: &K) {
        let ByteProduct { cx, left, .. } = *self;
        let width = cols.len().next_multiple_of(PAIR);
        let columns = &mut scratch.columns[..width];
        columns[..cols.len()].copy_from_slice(&self.scales[cols.clone()]);
        columns[cols.len()..].fill(0.0);
        let about = left.scales.as_deref().unwrap_or_default();
        let pairs = rows.len().div_ceil(PAIR);
        let updates = Updates::pack(cx, self.updates, &cols, width, &mut scratch.panels);
        for row in rows.clone().step_by(TOKENS) {
            let first = row - rows.start;
            let squares = Squares { data: &scratch.tiles[first / PAIR * SUMS..], stride: pairs * SUMS };
            // SAFETY: the token proves AVX-512.
            unsafe { scale(squares, first % PAIR, &about[row..row + TOKENS], columns, &mut scratch.sums) };
            let rows = left.rows.start + row..left.rows.start + rows.end.min(row + TOKENS);
            updates.add(cx, &rows, width, &scratch.panels, &mut scratch.sums);
            emit(cx.level, sink, Finished { rows, cols: cols.clone(), sums: &scratch.sums, stride: width });
        }
    }
}

/// Squares of sums of the same tokens, one for every [`PAIR`] of columns.
struct Squares<'a> {
    data: &'a [f32],
    stride: usize,
}

/// Writes the sums of some tokens, from the `first` of a square on, as floats, times the scales of tokens and columns,
/// token by token.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn scale(squares: Squares<'_>, first: usize, tokens: &[f32], columns: &[f32], out: &mut [f32]) {
    let width = columns.len();
    assert!(first + tokens.len() <= PAIR && width.is_multiple_of(PAIR) && out.len() >= tokens.len() * width);
    for (i, (token, out)) in tokens.iter().zip(out.chunks_exact_mut(width)).enumerate() {
        let line = (first + i) / 16 * 512 + (first + i) % 16 * 16;
        let parts = out.as_chunks_mut::<PAIR>().0.iter_mut().zip(columns.as_chunks::<PAIR>().0);
        for (j, (out, columns)) in parts.enumerate() {
            let square = &squares.data[j * squares.stride..][..SUMS];
            for half in 0..2 {
                // SAFETY: 16 values of a square's row, which lies inside, and 16 of the 32 columns.
                unsafe {
                    let sums = _mm512_loadu_si512(square.as_ptr().add(line + half * 256).cast());
                    let sums = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(*token));
                    let by = _mm512_loadu_ps(columns.as_ptr().add(half * 16));
                    _mm512_storeu_ps(out.as_mut_ptr().add(half * 16), _mm512_mul_ps(sums, by));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_tokens_become_floats_times_both_scales() {
        if Amx::detect().is_none() {
            return;
        }
        // Two squares of integers: token, then column.
        let place = |token: usize, col: usize| {
            col / PAIR * SUMS + (token / 16 * 2 + col % PAIR / 16) * 256 + token % 16 * 16 + col % 16
        };
        let mut data = vec![0f32; 2 * SUMS];
        for i in 0..2 * SUMS {
            data[place(i / 64, i % 64)] = f32::from_bits(i as u32);
        }
        let tokens: Vec<f32> = (0..16).map(|i| i as f32 + 0.5).collect();
        let columns: Vec<f32> = (0..64).map(|i| 2.0 / (i + 1) as f32).collect();
        let mut out = vec![0f32; 16 * 64];
        // SAFETY: a machine with AMX has AVX-512.
        unsafe { scale(Squares { data: &data, stride: SUMS }, 16, &tokens, &columns, &mut out) };
        for (i, &found) in out.iter().enumerate() {
            let (token, col) = (i / 64, i % 64);
            assert_eq!(found, ((16 + token) * 64 + col) as f32 * tokens[token] * columns[col]);
        }
    }
}

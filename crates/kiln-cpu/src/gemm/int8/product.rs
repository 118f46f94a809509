//! The blocked product on vectors: packed as in [`gemm`](crate::gemm), but of words that hold two or four integers.

use std::ops::Range;

use kiln_ops::Result;

use super::quantise::{Quantised, quantise};
use super::scale::scale;
use super::words::{Kind, WordTile, Words, dispatch_words};
use super::{Int8, Rows, Sink, Term};
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::cut::{Blocks, Cut};
use crate::gemm::{Finished, Updates, emit};
use crate::parallel::Disjoint;
use crate::simd::Simd;
use crate::weight::Stack;

/// Words summed in one go.
const DEPTH_WORDS: usize = 256;
/// Bytes of the longest row of a block.
const DEPTH_BYTES: usize = 4 * DEPTH_WORDS;
/// Columns of the result that a thread works on at once.
const COLS_AT_ONCE: usize = 128;
/// Rows of the result that a thread works on at once: a weight is packed once for so many.
const ROWS_AT_ONCE: usize = 1344;
/// The largest tile, in rows of the weight.
const MAX_COLS: usize = 32;

/// Activations in words, row by row.
pub(crate) struct Left {
    data: Buffer<u32>,
    /// Words from one row to the next.
    stride: usize,
    rows: Range<usize>,
    about: Buffer<f32>,
    sums: Buffer<i32>,
}

impl Left {
    pub fn new<X: Rows>(cx: &Context, x: &X, rows: Range<usize>, cols: usize) -> Result<Left> {
        let kind = Kind::of(cx.level);
        let sizes = kind.sizes();
        // A line more than whole lines, so that rows don't share the few sets of a cache.
        let stride = cols.next_multiple_of(64) / sizes.per_word + 16;
        let height = rows.len().next_multiple_of(sizes.tile_rows);
        let mut data = cx.buffer::<u32>(height.saturating_mul(stride))?;
        let (mut about, mut sums) = (cx.buffer(height)?, cx.buffer(height)?);
        {
            let (out, about, sums) =
                (Disjoint::new(&mut data), Disjoint::new(&mut about), Disjoint::new(&mut sums));
            let scratch = || Ok((cx.buffer::<f32>(cols)?, cx.buffer::<i8>(cols.next_multiple_of(64))?));
            cx.pool.each_with(height, scratch, |row, (wide, bytes)| {
                // SAFETY: every task has a row of its own.
                let (out, about, sum) = unsafe {
                    (
                        out.slice(row * stride..(row + 1) * stride),
                        about.slice(row..row + 1),
                        sums.slice(row..row + 1),
                    )
                };
                if row >= rows.len() {
                    out.fill(0);
                    return;
                }
                let found = quantise(kind, x, rows.start + row, wide, bytes);
                (about[0], sum[0]) = (found.scale, found.sum);
                to_words(bytes, sizes.per_word, out);
            })?;
        }
        Ok(Left { data, stride, rows, about, sums })
    }

    fn about(&self, row: usize) -> Quantised {
        Quantised { scale: self.about[row], sum: self.sums[row] }
    }
}

/// Bytes as they are, or widened to 16 bits; zeros behind them.
fn to_words(bytes: &[i8], per_word: usize, out: &mut [u32]) {
    let (words, rest) = out.split_at_mut(bytes.len() / per_word);
    rest.fill(0);
    if per_word == 4 {
        bytemuck::cast_slice_mut::<u32, i8>(words).copy_from_slice(bytes);
    } else {
        let words = bytemuck::cast_slice_mut::<u32, i16>(words);
        words.iter_mut().zip(bytes).for_each(|(out, &b)| *out = b.into());
    }
}

/// Packs `depth` words of the rows from `first` on, transposed, as many panels as `out` has room for.
#[inline(always)]
fn pack_kernel<W: Words>(w: W, weight: &Stack, first: usize, from: usize, depth: usize, out: &mut [u32]) {
    const { assert!(W::TILE_COLS <= MAX_COLS) }
    assert!(depth <= DEPTH_WORDS && depth.is_multiple_of(16));
    let (s, lanes) = (w.simd(), W::S::LANES);
    let mut rows = [0u32; MAX_COLS * DEPTH_WORDS];
    let flip = if W::UNSIGNED { 0x80u8 } else { 0 };
    for (panel, out) in out.chunks_exact_mut(W::TILE_COLS * depth).enumerate() {
        for (j, words) in rows.chunks_exact_mut(DEPTH_WORDS).take(W::TILE_COLS).enumerate() {
            let row = first + panel * W::TILE_COLS + j;
            let bytes = if row < weight.rows { weight.row(row) } else { &[] };
            let bytes = &bytes[bytes.len().min(from)..bytes.len().min(from + depth * W::PER_WORD)];
            let words = &mut words[..depth];
            if W::PER_WORD == 4 {
                // Behind the row's end stand zeros on the activations' side: anything will do.
                let (inside, rest) = bytemuck::cast_slice_mut::<u32, u8>(words).split_at_mut(bytes.len());
                inside.iter_mut().zip(bytes).for_each(|(out, &b)| *out = b ^ flip);
                rest.fill(flip);
            } else {
                let (inside, rest) = bytemuck::cast_slice_mut::<u32, i16>(words).split_at_mut(bytes.len());
                inside.iter_mut().zip(bytes).for_each(|(out, &b)| *out = (b as i8).into());
                rest.fill(0);
            }
        }
        for k in (0..depth).step_by(lanes) {
            for j in (0..W::TILE_COLS).step_by(lanes) {
                // SAFETY: a square of lanes × lanes inside both: j + lanes <= TILE_COLS, k + lanes <= depth.
                unsafe {
                    let to = out.as_mut_ptr().add(k * W::TILE_COLS + j);
                    s.transpose(
                        rows.as_ptr().add(j * DEPTH_WORDS + k).cast(),
                        DEPTH_WORDS,
                        to.cast(),
                        W::TILE_COLS,
                    );
                }
            }
        }
    }
}

dispatch_words! {
    fn pack(weight: &Stack, first: usize, from: usize, depth: usize, out: &mut [u32]) => pack_kernel;
}

/// A block of the left operand.
struct Block<'a> {
    data: &'a [u32],
    stride: usize,
    /// Whole tiles.
    rows: usize,
    depth: usize,
}

/// Writes (or with `add` adds) the product of a block and `panels` packed panels to `sums`, `width` apart.
#[inline(always)]
fn multiply_kernel<W: Words>(
    w: W,
    left: Block<'_>,
    panels: &[u32],
    count: usize,
    width: usize,
    sums: &mut [u32],
    add: bool,
) {
    assert!(left.rows.is_multiple_of(W::TILE_ROWS) && width >= count * W::TILE_COLS);
    assert!(left.rows == 0 || left.data.len() >= (left.rows - 1) * left.stride + left.depth);
    assert!(panels.len() >= count * W::TILE_COLS * left.depth && sums.len() >= left.rows * width);
    for row in (0..left.rows).step_by(W::TILE_ROWS) {
        for panel in 0..count {
            // SAFETY: the lengths were checked above.
            unsafe {
                w.tile(WordTile {
                    a: left.data.as_ptr().add(row * left.stride),
                    a_stride: left.stride,
                    b: panels.as_ptr().add(panel * W::TILE_COLS * left.depth),
                    c: sums.as_mut_ptr().add(row * width + panel * W::TILE_COLS),
                    stride: width,
                    depth: left.depth,
                    add,
                });
            }
        }
    }
}

dispatch_words! {
    fn multiply_words(
        left: Block<'_>, panels: &[u32], count: usize, width: usize, sums: &mut [u32], add: bool,
    ) => multiply_kernel;
}

/// Hands the product of all rows of `left`, and the updates, to the sink.
pub(crate) fn product<R: Rows + Send, K: Sink>(
    cx: &Context,
    left: &Left,
    weight: Int8<'_>,
    updates: &[Term<'_, R>],
    sink: &K,
) -> Result<()> {
    let kind = Kind::of(cx.level);
    let sizes = kind.sizes();
    let tile = sizes.tile_rows;
    let blocks = Blocks {
        tile_rows: tile,
        rows: [ROWS_AT_ONCE / tile * tile, 4 * tile],
        cols: [COLS_AT_ONCE, COLS_AT_ONCE],
    };
    let (height, cols) = (left.rows.len(), weight.stack.rows);
    let cut = Cut::new(cx.pool.threads(), [height, cols], &blocks);
    let width = cut.cols;
    let scratch = || {
        Ok((
            cx.buffer::<u32>(width * DEPTH_WORDS)?,
            cx.buffer::<f32>(cut.rows * width)?,
            cx.buffer::<f32>(Updates::scratch(updates, width))?,
            cx.buffer::<f32>(width)?,
        ))
    };
    cx.pool.each_with(cut.tasks, scratch, |task, (panels, sums, right, columns)| {
        let (row, col) = (task % cut.strips * cut.rows, task / cut.strips * cut.cols);
        let (rows, cols) = (row..height.min(row + cut.rows), col..cols.min(col + cut.cols));
        let count = cols.len().div_ceil(sizes.tile_cols);
        let step = DEPTH_BYTES / 4 * sizes.per_word;
        for from in (0..weight.stack.cols).step_by(step) {
            let depth = step.min((weight.stack.cols - from).next_multiple_of(64)) / sizes.per_word;
            let panels = &mut panels[..count * sizes.tile_cols * depth];
            pack(kind, weight.stack, cols.start, from, depth, panels);
            let start = rows.start * left.stride + from / sizes.per_word;
            let block = Block {
                data: &left.data[start..],
                stride: left.stride,
                rows: rows.len().next_multiple_of(tile),
                depth,
            };
            multiply_words(kind, block, panels, count, width, bytemuck::cast_slice_mut(sums), from > 0);
        }
        columns[..cols.len()].copy_from_slice(&weight.scales[cols.clone()]);
        columns[cols.len()..].fill(0.0);
        let about: Vec<Quantised> = rows.clone().map(|row| left.about(row)).collect();
        let offset = sizes.unsigned;
        scale(kind, &about, columns, offset, width, sums);
        let rows = left.rows.start + rows.start..left.rows.start + rows.end;
        let updates = Updates::pack(cx, updates, &cols, width, right);
        updates.add(cx, &rows, width, right, sums);
        emit(cx.level, sink, Finished { rows, cols, sums, stride: width });
    })
}

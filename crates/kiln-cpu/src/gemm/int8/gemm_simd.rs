//! The blocked int8 product in vectors: packed as in [`gemm`](crate::gemm), but in words of two or four values.

use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::Rotation;

use super::dequantize::dequantize;
use super::dot::{DotIsa, DotSimd, dispatch_dot};
use super::quantize::{QuantizedRow, quantize_row};
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::blocks::{BlockGrid, BlockSizes, BlockTask, ScratchSizes};
use crate::gemm::{Epilogue, PackedUpdates, RowSource, SumBlock, Term, run_epilogue};
use crate::matrix::{Int8Weight, StackedMatrix};
use crate::parallel::DisjointMut;
use crate::simd::{Simd, WordTileArgs};

/// Words summed before the tile is stored.
const KC_WORDS: usize = 256;
/// Columns of a block.
const NC: usize = 128;
/// Maximum rows of a block: the weight is packed once per block of rows.
const MC: usize = 1344;
/// The largest `DotSimd::TILE_COLS`.
const MAX_TILE_COLS: usize = 32;

/// Quantized activations in words, row by row.
pub(super) struct QuantizedRows {
    data: Buffer<u32>,
    /// Words from one row to the next.
    stride: usize,
    rows: Range<usize>,
    /// The scale and the integer sum of each row.
    scales: Buffer<f32>,
    sums: Buffer<i32>,
}

impl QuantizedRows {
    /// Rotates and quantizes `rows` of `x`, which has `cols` columns.
    pub fn new<X: RowSource>(
        cx: &Context,
        x: &X,
        rows: Range<usize>,
        cols: usize,
        rotation: Rotation,
    ) -> Result<QuantizedRows> {
        let isa = DotIsa::of(cx.level);
        let layout = isa.layout();
        // One cache line more than whole lines, so that rows don't share a few cache sets.
        let stride = cols.next_multiple_of(64) / layout.values_per_word + 16;
        let height = rows.len().next_multiple_of(layout.tile_rows);
        let mut data = cx.buffer::<u32>(height.saturating_mul(stride))?;
        let (mut scales, mut sums) = (cx.buffer(height)?, cx.buffer(height)?);
        {
            let (out, scales, sums) =
                (DisjointMut::new(&mut data), DisjointMut::new(&mut scales), DisjointMut::new(&mut sums));
            let scratch = || Ok((cx.buffer::<f32>(cols)?, cx.buffer::<i8>(cols.next_multiple_of(64))?));
            cx.pool.for_each_with(height, scratch, |row, (wide, bytes)| {
                // SAFETY: every task has a row of its own.
                let (out, scale, sum) = unsafe {
                    (
                        out.slice(row * stride..(row + 1) * stride),
                        scales.slice(row..row + 1),
                        sums.slice(row..row + 1),
                    )
                };
                if row >= rows.len() {
                    out.fill(0);
                    return;
                }
                let quantized = quantize_row(isa, x, rows.start + row, rotation, wide, bytes);
                (scale[0], sum[0]) = (quantized.scale, quantized.sum);
                to_words(bytes, layout.values_per_word, out);
            })?;
        }
        Ok(QuantizedRows { data, stride, rows, scales, sums })
    }

    fn row(&self, row: usize) -> QuantizedRow {
        QuantizedRow { scale: self.scales[row], sum: self.sums[row] }
    }
}

/// Copies int8 values, as they are or widened to 16 bits, with zeros behind them.
fn to_words(values: &[i8], values_per_word: usize, out: &mut [u32]) {
    let (words, rest) = out.split_at_mut(values.len() / values_per_word);
    rest.fill(0);
    if values_per_word == 4 {
        bytemuck::cast_slice_mut::<u32, i8>(words).copy_from_slice(values);
    } else {
        let words = bytemuck::cast_slice_mut::<u32, i16>(words);
        words.iter_mut().zip(values).for_each(|(out, &v)| *out = v.into());
    }
}

#[inline(always)]
fn pack_kernel<D: DotSimd>(
    d: D,
    weight: &StackedMatrix,
    first: usize,
    from: usize,
    depth: usize,
    out: &mut [u32],
) {
    const { assert!(D::TILE_COLS <= MAX_TILE_COLS) }
    assert!(depth <= KC_WORDS && depth.is_multiple_of(16));
    let lanes = D::S::LANES;
    let mut rows = [0u32; MAX_TILE_COLS * KC_WORDS];
    let flip = if D::UNSIGNED_WEIGHT { 0x80u8 } else { 0 };
    for (panel, out) in out.chunks_exact_mut(D::TILE_COLS * depth).enumerate() {
        for (j, words) in rows.chunks_exact_mut(KC_WORDS).take(D::TILE_COLS).enumerate() {
            let row = first + panel * D::TILE_COLS + j;
            let bytes = if row < weight.rows { weight.row(row) } else { &[] };
            let bytes = &bytes[bytes.len().min(from)..bytes.len().min(from + depth * D::VALUES_PER_WORD)];
            let words = &mut words[..depth];
            if D::VALUES_PER_WORD == 4 {
                // Past the end of the row the activations are zero: any value will do.
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
            for j in (0..D::TILE_COLS).step_by(lanes) {
                // SAFETY: a square of lanes × lanes inside both: j + lanes <= TILE_COLS, k + lanes <= depth.
                unsafe {
                    let to = out.as_mut_ptr().add(k * D::TILE_COLS + j);
                    d.transpose(rows.as_ptr().add(j * KC_WORDS + k), KC_WORDS, to, D::TILE_COLS);
                }
            }
        }
    }
}

dispatch_dot! {
    /// Packs `depth` words, from byte `from` on, of the weight rows from `first` on, transposed, as many panels as `out`
    /// has room for.
    fn pack_weight(
        weight: &StackedMatrix, first: usize, from: usize, depth: usize, out: &mut [u32],
    ) => pack_kernel;
}

/// Some rows and words of the left operand.
struct LeftBlock<'a> {
    data: &'a [u32],
    stride: usize,
    /// Whole tiles.
    rows: usize,
    depth: usize,
}

#[inline(always)]
fn multiply_kernel<D: DotSimd>(
    d: D,
    left: LeftBlock<'_>,
    panels: &[u32],
    count: usize,
    width: usize,
    sums: &mut [u32],
    add: bool,
) {
    assert!(left.rows.is_multiple_of(D::TILE_ROWS) && width >= count * D::TILE_COLS);
    assert!(left.depth.is_multiple_of(16));
    assert!(left.rows == 0 || left.data.len() >= (left.rows - 1) * left.stride + left.depth);
    assert!(panels.len() >= count * D::TILE_COLS * left.depth && sums.len() >= left.rows * width);
    for row in (0..left.rows).step_by(D::TILE_ROWS) {
        for panel in 0..count {
            // SAFETY: the lengths were checked above.
            unsafe {
                d.microkernel(WordTileArgs {
                    a: left.data.as_ptr().add(row * left.stride),
                    a_stride: left.stride,
                    b: panels.as_ptr().add(panel * D::TILE_COLS * left.depth),
                    c: sums.as_mut_ptr().add(row * width + panel * D::TILE_COLS),
                    stride: width,
                    depth: left.depth,
                    add,
                });
            }
        }
    }
}

dispatch_dot! {
    /// Writes (or with `add` adds) the product of a block and `count` packed panels to `sums`, whose rows are `width`
    /// apart.
    fn multiply(
        left: LeftBlock<'_>, panels: &[u32], count: usize, width: usize, sums: &mut [u32], add: bool,
    ) => multiply_kernel;
}

/// Computes the product of all rows of `left` with the weight, plus the updates.
pub(super) fn gemm_simd<R: RowSource + Send, E: Epilogue>(
    cx: &Context,
    left: &QuantizedRows,
    weight: Int8Weight<'_>,
    updates: &[Term<'_, R>],
    epilogue: &E,
) -> Result<()> {
    let isa = DotIsa::of(cx.level);
    let layout = isa.layout();
    let tile_rows = layout.tile_rows;
    let sizes = BlockSizes {
        tile_rows,
        max_rows: MC / tile_rows * tile_rows,
        min_rows: 4 * tile_rows,
        max_cols: NC,
        min_cols: NC,
        group_cols: 1,
    };
    let (depth, cols) = (weight.matrix.cols, weight.matrix.rows);
    let grid = BlockGrid::balanced(cx.pool.threads(), [left.rows.len(), cols], &sizes);
    let width = grid.block_cols;
    let scratch = ScratchSizes {
        packed: width * KC_WORDS * size_of::<u32>(),
        sums: grid.block_rows * width,
        updates: PackedUpdates::panels_len(updates, width),
        col_scales: width,
        ..ScratchSizes::default()
    };
    // Bytes of a weight row summed in one go.
    let kc = KC_WORDS * layout.values_per_word;
    grid.run(cx, scratch, |BlockTask { block, .. }, scratch| {
        let (rows, cols) = (block.rows, block.cols);
        let panels: &mut [u32] = bytemuck::cast_slice_mut(&mut scratch.packed);
        let count = cols.len().div_ceil(layout.tile_cols);
        for from in (0..depth).step_by(kc) {
            let words = kc.min((depth - from).next_multiple_of(64)) / layout.values_per_word;
            let panels = &mut panels[..count * layout.tile_cols * words];
            pack_weight(isa, weight.matrix, cols.start, from, words, panels);
            let start = rows.start * left.stride + from / layout.values_per_word;
            let left = LeftBlock {
                data: &left.data[start..],
                stride: left.stride,
                rows: rows.len().next_multiple_of(tile_rows),
                depth: words,
            };
            multiply(isa, left, panels, count, width, bytemuck::cast_slice_mut(&mut scratch.sums), from > 0);
        }
        scratch.load_col_scales(&weight.scales[cols.clone()], width);
        let quantized: Vec<QuantizedRow> = rows.clone().map(|row| left.row(row)).collect();
        dequantize(isa, &quantized, &scratch.col_scales, width, &mut scratch.sums);
        let rows = left.rows.start + rows.start..left.rows.start + rows.end;
        let updates = PackedUpdates::pack(cx, updates, &cols, width, &mut scratch.updates);
        updates.add(cx, &rows, width, &scratch.updates, &mut scratch.sums);
        run_epilogue(cx.level, epilogue, SumBlock { rows, cols, sums: &scratch.sums, stride: width });
    })
}

//! The operand that is rearranged into tiles: activations of a linear layer, or the kernel of a convolution.

use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::{Rotation, bf16};

use super::pack::{pack_left_row, pack_right_tiles};
use super::sizes::{KC_BYTES, PAIR, TILE_ROW_BYTES};
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::int8::{DotIsa, quantize_row};
use crate::gemm::{Bf16Rows, RowSource};
use crate::isa::Amx;
use crate::parallel::DisjointMut;
use crate::simd::TILE_BYTES;

/// Rows packed as tiles: for every block of [`KC_BYTES`], for every [`PAIR`] of rows, two tiles per step.
///
/// Either right tiles of bf16, to be multiplied with a weight's rows, or left tiles of int8, to be multiplied with a
/// weight that is packed as right tiles.
pub(crate) struct TiledOperand {
    data: Buffer<u8>,
    pub rows: Range<usize>,
    /// Bytes of a row.
    pub depth: usize,
    /// The scale of each row that was quantized to int8; 0 for those that pad the last [`PAIR`].
    pub scales: Option<Buffer<f32>>,
}

impl TiledOperand {
    /// Space for these rows of `depth` bytes.
    fn new(cx: &Context, rows: Range<usize>, depth: usize) -> Result<TiledOperand> {
        let padded = rows.len().next_multiple_of(PAIR);
        let data = cx.buffer(padded.saturating_mul(depth.next_multiple_of(TILE_ROW_BYTES)))?;
        Ok(TiledOperand { data, rows, depth, scales: None })
    }

    /// Packs the first `columns` of these rows as right tiles of bf16.
    pub fn pack_bf16(
        cx: &Context,
        amx: Amx,
        source: &impl Bf16Rows,
        rows: Range<usize>,
        columns: usize,
    ) -> Result<TiledOperand> {
        let mut operand = TiledOperand::new(cx, rows.clone(), 2 * columns)?;
        let layout = operand.layout();
        let out = DisjointMut::new(&mut operand.data);
        let blocks = layout.depth.div_ceil(KC_BYTES);
        let scratch = || cx.buffer::<bf16>(PAIR * KC_BYTES / 2);
        cx.pool.for_each_with(layout.rows / PAIR * blocks, scratch, |task, lines| {
            let (pair, from) = (task / blocks, task % blocks * KC_BYTES);
            let inside = KC_BYTES.min(layout.depth - from);
            for (i, line) in lines.chunks_exact_mut(KC_BYTES / 2).enumerate() {
                let row = rows.start + pair * PAIR + i;
                let count = if row < rows.end { inside / 2 } else { 0 };
                source.copy_row(row, from / 2, &mut line[..count]);
                line[count..].fill(bf16::ZERO);
            }
            // SAFETY: every task has tiles of its own.
            let out = unsafe { out.slice(layout.range(from, pair)) };
            // SAFETY: the token proves AVX-512.
            unsafe {
                pack_right_tiles(
                    amx,
                    bytemuck::cast_slice(lines),
                    KC_BYTES,
                    inside.div_ceil(TILE_ROW_BYTES),
                    out,
                )
            };
        })?;
        Ok(operand)
    }

    /// Rotates and quantizes the first `columns` of these rows, each by its largest element, and packs them as left tiles of int8.
    pub fn quantize_int8<X: RowSource>(
        cx: &Context,
        source: &X,
        rows: Range<usize>,
        columns: usize,
        rotation: Rotation,
    ) -> Result<TiledOperand> {
        let isa = DotIsa::of(cx.level);
        let mut operand = TiledOperand::new(cx, rows.clone(), columns)?;
        let layout = operand.layout();
        let mut scales = cx.buffer::<f32>(layout.rows)?;
        {
            let (out, scales) = (DisjointMut::new(&mut operand.data), DisjointMut::new(&mut scales));
            let padded = columns.next_multiple_of(TILE_ROW_BYTES);
            let scratch = || Ok((cx.buffer::<f32>(columns)?, cx.buffer::<i8>(padded)?));
            cx.pool.for_each_with(layout.rows / PAIR, scratch, |pair, (wide, line)| {
                // SAFETY: every task has rows of its own.
                let scales = unsafe { scales.slice(pair * PAIR..(pair + 1) * PAIR) };
                for (i, scale) in scales.iter_mut().enumerate() {
                    let row = rows.start + pair * PAIR + i;
                    *scale = 0.0;
                    if row < rows.end {
                        *scale = quantize_row(isa, source, row, rotation, wide, line).scale;
                    } else {
                        line.fill(0);
                    }
                    for from in (0..padded).step_by(KC_BYTES) {
                        let block = &line[from..padded.min(from + KC_BYTES)];
                        // SAFETY: every task has tiles of its own.
                        let out = unsafe { out.slice(layout.range(from, pair)) };
                        pack_left_row(bytemuck::cast_slice(block), i, block.len() / TILE_ROW_BYTES, out);
                    }
                }
            })?;
        }
        operand.scales = Some(scales);
        Ok(operand)
    }

    fn layout(&self) -> TileLayout {
        TileLayout { rows: self.rows.len().next_multiple_of(PAIR), depth: self.depth }
    }

    /// The tiles of the `pair`th [`PAIR`] of rows in the block that begins at byte `from`.
    pub fn tiles(&self, from: usize, pair: usize) -> &[u8] {
        &self.data[self.layout().range(from, pair)]
    }

    /// The tiles of these pairs of rows in the block that begins at byte `from`; empty past the last block.
    pub fn block(&self, from: usize, pairs: Range<usize>) -> &[u8] {
        let start = |pair| self.layout().range(from.min(self.depth), pair).start;
        &self.data[start(pairs.start)..start(pairs.end)]
    }
}

/// Where the tiles of a [`TiledOperand`] lie.
#[derive(Clone, Copy)]
struct TileLayout {
    /// Rows, in whole pairs.
    rows: usize,
    /// Bytes of a row.
    depth: usize,
}

impl TileLayout {
    /// The bytes of the `pair`th [`PAIR`] of rows in the block that begins at byte `from`.
    fn range(self, from: usize, pair: usize) -> Range<usize> {
        let length = KC_BYTES.min(self.depth - from).div_ceil(TILE_ROW_BYTES) * 2 * TILE_BYTES;
        let start = self.rows * from + pair * length;
        start..start + length
    }
}

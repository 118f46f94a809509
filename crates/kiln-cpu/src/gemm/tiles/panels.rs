//! The operand that is rearranged: activations of a linear layer, or the kernel of a convolution.

use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::bf16;

use super::pack::{LINE, PAIR, left_line, right_tiles};
use crate::Context;
use crate::buffer::Buffer;
use crate::gemm::Rows;
use crate::gemm::int8::{Kind, quantise};
use crate::parallel::Disjoint;
use crate::simd::{Amx, TILE_BYTES};

/// Bytes of a row summed in one go. The weight rows of a step (32 KiB) stay in the first-level cache while the tokens go
/// by.
pub(super) const BLOCK: usize = 1024;

/// A bf16 matrix that can be read row by row, wherever its parts lie.
pub(crate) trait Halves: Sync {
    /// Copies the values of `row` from column `from` on.
    fn copy(&self, row: usize, from: usize, out: &mut [bf16]);
}

/// Rows as tiles: for every block of columns, for every [`PAIR`] of rows, two tiles a step. Right tiles of bf16, which
/// meet a weight's rows; left tiles of bytes, which meet a weight that lies as right tiles.
pub(crate) struct Panels {
    data: Buffer<u8>,
    pub rows: Range<usize>,
    /// Bytes of a row.
    pub depth: usize,
    /// Of rows that were rounded to bytes: the scale of each, and of what fills the last [`PAIR`].
    pub scales: Option<Buffer<f32>>,
}

impl Panels {
    /// Room for these rows of `depth` bytes.
    fn new(cx: &Context, rows: Range<usize>, depth: usize) -> Result<Panels> {
        let area = rows.len().next_multiple_of(PAIR);
        let data = cx.buffer(area.saturating_mul(depth.next_multiple_of(LINE)))?;
        Ok(Panels { data, rows, depth, scales: None })
    }

    /// The first `columns` of these rows as they are, as right tiles.
    pub fn of_halves(
        cx: &Context,
        amx: Amx,
        source: &impl Halves,
        rows: Range<usize>,
        columns: usize,
    ) -> Result<Panels> {
        let mut panels = Panels::new(cx, rows.clone(), 2 * columns)?;
        let layout = panels.layout();
        let out = Disjoint::new(&mut panels.data);
        let blocks = layout.depth.div_ceil(BLOCK);
        let scratch = || cx.buffer::<bf16>(PAIR * BLOCK / 2);
        cx.pool.each_with(layout.area / PAIR * blocks, scratch, |task, lines| {
            let (pair, from) = (task / blocks, task % blocks * BLOCK);
            let inside = BLOCK.min(layout.depth - from);
            for (i, line) in lines.chunks_exact_mut(BLOCK / 2).enumerate() {
                let row = rows.start + pair * PAIR + i;
                let count = if row < rows.end { inside / 2 } else { 0 };
                source.copy(row, from / 2, &mut line[..count]);
                line[count..].fill(bf16::ZERO);
            }
            // SAFETY: every task has tiles of its own.
            let out = unsafe { out.slice(layout.place(from, pair)) };
            // SAFETY: the token proves AVX-512.
            unsafe { right_tiles(amx, bytemuck::cast_slice(lines), BLOCK, inside.div_ceil(LINE), out) };
        })?;
        Ok(panels)
    }

    /// The first `columns` of these rows, each rounded to bytes by its largest element, as left tiles.
    pub fn of_bytes<X: Rows>(cx: &Context, source: &X, rows: Range<usize>, columns: usize) -> Result<Panels> {
        let kind = Kind::of(cx.level);
        let mut panels = Panels::new(cx, rows.clone(), columns)?;
        let layout = panels.layout();
        let mut scales = cx.buffer::<f32>(layout.area)?;
        {
            let (out, scales) = (Disjoint::new(&mut panels.data), Disjoint::new(&mut scales));
            let padded = columns.next_multiple_of(LINE);
            let scratch = || Ok((cx.buffer::<f32>(columns)?, cx.buffer::<i8>(padded)?));
            cx.pool.each_with(layout.area / PAIR, scratch, |pair, (wide, line)| {
                // SAFETY: every task has rows of its own.
                let scales = unsafe { scales.slice(pair * PAIR..(pair + 1) * PAIR) };
                for (i, scale) in scales.iter_mut().enumerate() {
                    let row = rows.start + pair * PAIR + i;
                    *scale = 0.0;
                    match row < rows.end {
                        true => *scale = quantise(kind, source, row, wide, line).scale,
                        false => line.fill(0),
                    }
                    for from in (0..padded).step_by(BLOCK) {
                        let block = &line[from..padded.min(from + BLOCK)];
                        // SAFETY: every task has tiles of its own.
                        let out = unsafe { out.slice(layout.place(from, pair)) };
                        left_line(bytemuck::cast_slice(block), i, block.len() / LINE, out);
                    }
                }
            })?;
        }
        panels.scales = Some(scales);
        Ok(panels)
    }

    fn layout(&self) -> Layout {
        Layout { area: self.rows.len().next_multiple_of(PAIR), depth: self.depth }
    }

    /// The tiles of the `pair`th [`PAIR`] of rows in the block that begins at byte `from`.
    pub fn tiles(&self, from: usize, pair: usize) -> &[u8] {
        &self.data[self.layout().place(from, pair)]
    }

    /// The tiles of these pairs of rows in the block that begins at byte `from`; none beyond the last one.
    pub fn block(&self, from: usize, pairs: Range<usize>) -> &[u8] {
        let place = |pair| self.layout().place(from.min(self.depth), pair).start;
        &self.data[place(pairs.start)..place(pairs.end)]
    }
}

#[derive(Clone, Copy)]
struct Layout {
    /// Rows, whole pairs of them.
    area: usize,
    depth: usize,
}

impl Layout {
    fn place(self, from: usize, pair: usize) -> Range<usize> {
        let length = BLOCK.min(self.depth - from).div_ceil(LINE) * 2 * TILE_BYTES;
        let start = self.area * from + pair * length;
        start..start + length
    }
}

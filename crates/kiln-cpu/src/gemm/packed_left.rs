//! The packed left operand of a product, and a product that it is part of.

use std::ops::Range;

use kiln_ops::Result;

use super::{PackedFormat, RowSource};
use crate::Context;
use crate::buffer::Buffer;
use crate::isa::Level;
use crate::parallel::DisjointMut;
use crate::simd::KC;

/// Packed rows of a left operand: for every block of [`KC`] columns, all rows.
pub(crate) struct PackedLeft<P: PackedFormat = Level> {
    data: Buffer<P::Element>,
    pub rows: Range<usize>,
    pub depth: usize,
}

impl<P: PackedFormat> PackedLeft<P> {
    /// Packs `rows` of the source, which have `depth` columns.
    pub fn new<R: RowSource>(
        cx: &Context,
        format: P,
        source: &R,
        rows: Range<usize>,
        depth: usize,
    ) -> Result<PackedLeft<P>> {
        const PACK_ROWS_PER_TASK: usize = 32;
        let (blocks, height) = (depth.div_ceil(KC), rows.len());
        let mut data = cx.buffer(blocks.saturating_mul(height).saturating_mul(KC))?;
        let out = DisjointMut::new(&mut data);
        cx.pool.for_each(blocks * height.div_ceil(PACK_ROWS_PER_TASK), |task| {
            let (block, first) = (task % blocks, task / blocks * PACK_ROWS_PER_TASK);
            let end = height.min(first + PACK_ROWS_PER_TASK);
            let from = block * KC;
            // SAFETY: every task has rows of its own in its block.
            let out = unsafe { out.slice((block * height + first) * KC..(block * height + end) * KC) };
            format.pack_left(source, rows.start + first, from, KC.min(depth - from), out);
        });
        Ok(PackedLeft { data, rows, depth })
    }

    /// For each block its first column, its width, and its values for some of the rows.
    pub fn blocks(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, usize, &[P::Element])> {
        (0..self.depth.div_ceil(KC)).map(move |block| {
            let from = block * KC;
            let start = (block * self.rows.len() + rows.start - self.rows.start) * KC;
            (from, KC.min(self.depth - from), &self.data[start..][..rows.len() * KC])
        })
    }
}

/// One of the products that add up to the result; `right` has a row for every column of the result, or for every step of the
/// sum ([`Orientation`](super::Orientation)).
pub(crate) struct Term<'a, R, P: PackedFormat = Level> {
    pub left: &'a PackedLeft<P>,
    pub right: R,
    /// The columns of the result to which it contributes.
    pub cols: Range<usize>,
}

impl<R> Term<'_, R> {
    /// Whether it contributes to some of these columns.
    pub fn reaches(&self, cols: &Range<usize>) -> bool {
        self.cols.start < cols.end && cols.start < self.cols.end
    }
}

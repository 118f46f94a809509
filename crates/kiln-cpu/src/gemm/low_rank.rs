//! Low-rank updates (LoRA) in f32, added to the sums of a product in another number format.

use std::ops::Range;

use super::{GemmSize, PackedFormat, RowSource, Term};
use crate::Context;
use crate::simd::KC;

/// The updates that contribute to some columns, with their right operands packed.
pub(crate) struct PackedUpdates<'a, R> {
    terms: Vec<&'a Term<'a, R>>,
}

impl<'a, R: RowSource> PackedUpdates<'a, R> {
    /// The length of `panels` that [`PackedUpdates::pack`] needs.
    pub fn panels_len(updates: &[Term<'_, R>], width: usize) -> usize {
        width * updates.iter().map(|u| u.left.depth).sum::<usize>()
    }

    /// Packs what contributes to `cols` into `panels`; `width` is the number of columns, rounded up to whole panels.
    pub fn pack(
        cx: &Context,
        updates: &'a [Term<'a, R>],
        cols: &Range<usize>,
        width: usize,
        panels: &mut [f32],
    ) -> Self {
        let terms: Vec<_> = updates.iter().filter(|update| update.reaches(cols)).collect();
        let mut at = 0;
        for term in &terms {
            for from in (0..term.left.depth).step_by(KC) {
                let depth = KC.min(term.left.depth - from);
                let panels = &mut panels[at..][..width * depth];
                cx.level.pack_right(&term.right, cols.start, from, depth, panels);
                at += width * depth;
            }
        }
        PackedUpdates { terms }
    }

    /// Adds the updates to the sums of `rows`, which lie `width` apart.
    pub fn add(&self, cx: &Context, rows: &Range<usize>, width: usize, panels: &[f32], sums: &mut [f32]) {
        let count = width / cx.level.tile_cols();
        let mut at = 0;
        for term in &self.terms {
            for (_, depth, left) in term.left.blocks(rows.clone()) {
                let size = GemmSize { rows: rows.len(), panels: count, depth, stride: width };
                cx.level.multiply(size, left, &panels[at..][..width * depth], sums, true);
                at += width * depth;
            }
        }
    }
}

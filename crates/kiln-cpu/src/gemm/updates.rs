//! What low-rank updates add to the sums of a product in another number format.

use std::ops::Range;

use super::{DEPTH, Extent, Rows, Term, multiply, pack_right};
use crate::Context;

/// The updates that reach some columns, their right operands packed.
pub(crate) struct Updates<'a, R> {
    terms: Vec<&'a Term<'a, R>>,
}

impl<'a, R: Rows> Updates<'a, R> {
    /// Values of scratch that [`Updates::pack`] needs.
    pub fn scratch(updates: &[Term<'_, R>], width: usize) -> usize {
        width * updates.iter().map(|u| u.left.depth).sum::<usize>()
    }

    /// Packs what concerns `cols`, whose sums are `width` apart.
    pub fn pack(
        cx: &Context,
        updates: &'a [Term<'a, R>],
        cols: &Range<usize>,
        width: usize,
        panels: &mut [f32],
    ) -> Self {
        let reach = |u: &&Term<'_, R>| u.cols.start < cols.end && cols.start < u.cols.end;
        let terms: Vec<_> = updates.iter().filter(reach).collect();
        let mut at = 0;
        for term in &terms {
            for from in (0..term.left.depth).step_by(DEPTH) {
                let depth = DEPTH.min(term.left.depth - from);
                let panels = &mut panels[at..][..width * depth];
                pack_right(cx.level, &term.right, cols.start, from, depth, panels);
                at += width * depth;
            }
        }
        Updates { terms }
    }

    /// Adds them to the sums of `rows`.
    pub fn add(&self, cx: &Context, rows: &Range<usize>, width: usize, panels: &[f32], sums: &mut [f32]) {
        let count = width / cx.level.tile_cols();
        let mut at = 0;
        for term in &self.terms {
            for (_, depth, left) in term.left.blocks(rows.clone()) {
                let size = Extent { rows: rows.len(), panels: count, depth, stride: width };
                multiply(cx.level, size, left, &panels[at..][..width * depth], sums, true);
                at += width * depth;
            }
        }
    }
}

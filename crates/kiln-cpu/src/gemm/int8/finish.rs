//! From exact sums to floats, and what is added to them.

use std::ops::Range;

use super::quantise::Quantised;
use super::words::{Kind, Words, dispatch_words};
use crate::Context;
use crate::gemm::{DEPTH, Extent, Rows, Term, multiply, pack_right};
use crate::simd::Simd;

/// Turns rows of sums, `stride` apart, into floats in place: `sum · scale of the row · scale of the column`.
#[inline(always)]
fn scale_kernel<W: Words>(
    w: W,
    rows: &[Quantised],
    columns: &[f32],
    offset: bool,
    stride: usize,
    sums: &mut [f32],
) {
    let s = w.simd();
    let lanes = W::S::LANES;
    let width = columns.len();
    assert!(width.is_multiple_of(lanes) && stride >= width);
    for (row, sums) in rows.iter().zip(sums.chunks_mut(stride)) {
        assert!(sums.len() >= width);
        let factor = s.splat(row.scale);
        let excess = if offset { row.sum.wrapping_mul(128) } else { 0 };
        for i in (0..width).step_by(lanes) {
            // SAFETY: i + lanes <= width, the length of both.
            unsafe {
                let at = sums.as_mut_ptr().add(i);
                let v = w.floats_of_difference(w.load(at.cast()), excess);
                s.store(at, s.mul(s.mul(v, factor), s.load(columns.as_ptr().add(i))));
            }
        }
    }
}

dispatch_words! {
    /// Turns rows of sums into floats. With `offset` they are too large by 128 times the sum of the row.
    pub(super) fn scale(
        rows: &[Quantised], columns: &[f32], offset: bool, stride: usize, sums: &mut [f32],
    ) => scale_kernel;
}

/// The updates that reach some columns, their right operands packed.
pub(super) struct Updates<'a, R> {
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

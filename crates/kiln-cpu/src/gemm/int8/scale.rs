//! From exact sums to floats.

use super::quantise::Quantised;
use super::words::{Kind, Words, dispatch_words};
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

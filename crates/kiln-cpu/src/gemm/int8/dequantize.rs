//! Dequantization of exact integer sums to f32.

use super::dot::{DotIsa, DotSimd, dispatch_dot};
use super::quantize::QuantizedRow;
use crate::simd::Simd;

#[inline(always)]
fn dequantize_kernel<D: DotSimd>(
    d: D,
    rows: &[QuantizedRow],
    col_scales: &[f32],
    stride: usize,
    sums: &mut [f32],
) {
    let s = d.simd();
    let lanes = D::S::LANES;
    let width = col_scales.len();
    assert!(width.is_multiple_of(lanes) && stride >= width);
    for (row, sums) in rows.iter().zip(sums.chunks_mut(stride)) {
        assert!(sums.len() >= width);
        let row_scale = s.splat(row.scale);
        let excess = if D::UNSIGNED_WEIGHT { row.sum.wrapping_mul(128) } else { 0 };
        for i in (0..width).step_by(lanes) {
            // SAFETY: i + lanes <= width, the length of both.
            unsafe {
                let at = sums.as_mut_ptr().add(i);
                let v = d.sub_to_f32(d.load(at.cast()), excess);
                s.store(at, s.mul(s.mul(v, row_scale), s.load(col_scales.as_ptr().add(i))));
            }
        }
    }
}

dispatch_dot! {
    /// Turns rows of integer sums, `stride` apart, into f32 in place: `sum · row scale · column scale`.
    pub(super) fn dequantize(
        rows: &[QuantizedRow], col_scales: &[f32], stride: usize, sums: &mut [f32],
    ) => dequantize_kernel;
}

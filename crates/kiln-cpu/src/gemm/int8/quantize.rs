//! Quantization of activations to int8, one row at a time: [`kiln_ops::int8::quantize_row`] of a rotated row in vectors.

use kiln_ops::int8::RowScale;
use kiln_tensor::Rotation;

use super::dot::{DotIsa, DotSimd, dispatch_dot};
use super::rotate::rotate;
use crate::gemm::RowSource;
use crate::simd::{Simd, reduce_add, reduce_max};

/// Adding and subtracting 1.5 · 2²³ rounds a small number to an integer, ties to even; between the two, the low byte of
/// the bits is that integer.
const MAGIC: f32 = 12_582_912.0;

/// The scale of a quantized row and the sum of its integers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct QuantizedRow {
    pub scale: f32,
    pub sum: i32,
}

#[inline(always)]
fn quantize_kernel<D: DotSimd, R: RowSource>(
    d: D,
    source: &R,
    row: usize,
    rotation: Rotation,
    wide: &mut [f32],
    out: &mut [i8],
) -> QuantizedRow {
    let s = d.simd();
    let lanes = D::S::LANES;
    let cols = wide.len();
    assert!(out.len() >= cols.next_multiple_of(lanes));
    source.read_row(s, row, 0, wide);
    rotate(s, rotation, wide);
    let whole = cols / lanes * lanes;
    let (zero, mut max, mut invalid) = (s.splat(0.0), s.splat(0.0), s.splat(0.0));
    for i in (0..whole).step_by(lanes) {
        // SAFETY: i + lanes <= cols.
        let x = unsafe { s.load(wide.as_ptr().add(i)) };
        max = s.max(s.max(x, s.sub(zero, x)), max);
        // Stays 0 unless there is a NaN or an infinity; `max` misses a NaN.
        invalid = s.fma(x, zero, invalid);
    }
    let mut max = reduce_max(s, max);
    let mut invalid = reduce_add(s, invalid);
    for &x in &wide[whole..] {
        max = if x.abs() > max { x.abs() } else { max };
        invalid += x * 0.0;
    }
    let RowScale { inverse, scale } = RowScale::new(if invalid == 0.0 { max } else { f32::NAN });
    let (factor, magic, mut sums) = (s.splat(inverse), s.splat(MAGIC), s.splat(0.0));
    for i in (0..whole).step_by(lanes) {
        // SAFETY: i + lanes <= cols, and `out` is as long.
        unsafe {
            // Not a fused multiply-add, which rounds once and so differs.
            let v = s.add(s.mul(s.load(wide.as_ptr().add(i)), factor), magic);
            sums = s.add(sums, s.sub(v, magic));
            d.store_bytes(out.as_mut_ptr().add(i), v);
        }
    }
    // Exact: the integers of the widest row add up to less than 2²⁴.
    let mut total = reduce_add(s, sums);
    out[whole..].fill(0);
    for (&x, out) in wide[whole..].iter().zip(&mut out[whole..]) {
        let v = x * inverse + MAGIC;
        total += v - MAGIC;
        *out = v.to_bits() as i8;
    }
    QuantizedRow { scale, sum: total as i32 }
}

dispatch_dot! {
    /// Quantizes `row` of `source`, which has `wide.len()` columns, rotated, to `out`, with zeros behind them. `wide` is scratch.
    pub(crate) fn quantize_row<R: RowSource>(
        source: &R, row: usize, rotation: Rotation, wide: &mut [f32], out: &mut [i8],
    ) -> QuantizedRow => quantize_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Isa, Level};
    use kiln_ops::int8;

    struct SingleRow(Vec<f32>);

    impl RowSource for SingleRow {
        fn read_row<S: Simd>(&self, _: S, _: usize, from: usize, out: &mut [f32]) {
            out.copy_from_slice(&self.0[from..from + out.len()]);
        }
    }

    #[test]
    fn every_set_rounds_as_the_reference_does() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut rows: Vec<Vec<f32>> =
            [1, 3, 16, 31, 80, 100, 256, 832, 1003, 1024].map(|n| (0..n).map(|_| next()).collect()).into();
        // Ties, which go to the even neighbour; rows quantized to zeros; NaN and infinity, early and in the tail.
        rows.push((-254..=254).map(|i| i as f32 / 2.0).collect());
        rows.push(vec![1e-31; 40]);
        rows.push(vec![0.0; 5]);
        rows.push((0..40).map(|i| if i == 3 { f32::NAN } else { 1.0 }).collect());
        rows.push((0..33).map(|i| if i == 32 { f32::NEG_INFINITY } else { 1.0 }).collect());
        for isa in Isa::available() {
            let dot = DotIsa::of(Level::detect(isa).unwrap());
            let rotations = rows.iter().flat_map(|row| Rotation::ALL.map(|rotation| (row, rotation)));
            for (row, rotation) in rotations.filter(|(row, rotation)| rotation.fits(row.len())) {
                let (mut expected, mut rotated) = (vec![0; row.len()], row.clone());
                rotation.rotate(&mut rotated);
                let scale = int8::quantize_row(&rotated, &mut expected);
                let mut found = vec![9i8; row.len().next_multiple_of(64)];
                let mut wide = vec![0.0; row.len()];
                let source = SingleRow(row.clone());
                let q = quantize_row(dot, &source, 0, rotation, &mut wide, &mut found);
                if scale.is_nan() {
                    assert!(q.scale.is_nan(), "{isa}: {row:?}");
                    continue;
                }
                assert_eq!(&found[..row.len()], &expected, "{isa}");
                assert!(found[row.len()..].iter().all(|&b| b == 0), "{isa}");
                let sum = expected.iter().map(|&b| i32::from(b)).sum();
                assert_eq!(q, QuantizedRow { scale, sum }, "{isa}");
            }
        }
    }
}

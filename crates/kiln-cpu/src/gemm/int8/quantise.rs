//! Activations to bytes, a row at a time: [`kiln_ops::int8::quantise_row`] on vectors.

use kiln_ops::int8::RowScale;

use super::words::{Kind, Words, dispatch_words};
use crate::gemm::Rows;
use crate::simd::{Simd, largest, sum};

/// Adding and taking away 1.5 · 2²³ drops the fraction of a small number, ties to even; in between, the low byte of the
/// sum's bits is the integer.
const MAGIC: f32 = 12_582_912.0;

/// A row in integers: its scale, and the sum of the integers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Quantised {
    pub scale: f32,
    pub sum: i32,
}

/// Rounds `row` of `source`, `wide.len()` columns, to `out`, zeros behind them. `wide` is scratch.
#[inline(always)]
fn quantise_kernel<W: Words, R: Rows>(
    w: W,
    source: &R,
    row: usize,
    wide: &mut [f32],
    out: &mut [i8],
) -> Quantised {
    let s = w.simd();
    let lanes = W::S::LANES;
    let cols = wide.len();
    assert!(out.len() >= cols.next_multiple_of(lanes));
    source.fill(s, row, 0, wide);
    let whole = cols / lanes * lanes;
    let (zero, mut most, mut bad) = (s.splat(0.0), s.splat(0.0), s.splat(0.0));
    for i in (0..whole).step_by(lanes) {
        // SAFETY: i + lanes <= cols.
        let x = unsafe { s.load(wide.as_ptr().add(i)) };
        most = s.max(s.max(x, s.sub(zero, x)), most);
        // Zero unless there is a NaN or an infinity, which `max` would not see.
        bad = s.fma(x, zero, bad);
    }
    let mut most = largest(s, most);
    let mut bad = sum(s, bad);
    for &x in &wide[whole..] {
        most = if x.abs() > most { x.abs() } else { most };
        bad += x * 0.0;
    }
    let RowScale { inverse, scale } = RowScale::new(if bad == 0.0 { most } else { f32::NAN });
    let (factor, magic, mut sums) = (s.splat(inverse), s.splat(MAGIC), s.splat(0.0));
    for i in (0..whole).step_by(lanes) {
        // SAFETY: i + lanes <= cols, and `out` is as long.
        unsafe {
            // Not a fused multiply-add, which rounds once and so differs.
            let v = s.add(s.mul(s.load(wide.as_ptr().add(i)), factor), magic);
            sums = s.add(sums, s.sub(v, magic));
            w.store_bytes(out.as_mut_ptr().add(i), v);
        }
    }
    // Exact: the integers of the widest row add up to less than 2²⁴.
    let mut total = sum(s, sums);
    out[whole..].fill(0);
    for (&x, out) in wide[whole..].iter().zip(&mut out[whole..]) {
        let v = x * inverse + MAGIC;
        total += v - MAGIC;
        *out = v.to_bits() as i8;
    }
    Quantised { scale, sum: total as i32 }
}

dispatch_words! {
    /// Rounds one row to bytes.
    pub(crate) fn quantise<R: Rows>(
        source: &R, row: usize, wide: &mut [f32], out: &mut [i8],
    ) -> Quantised => quantise_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Isa, Level};
    use kiln_ops::int8::quantise_row;

    struct One(Vec<f32>);

    impl Rows for One {
        fn fill<S: Simd>(&self, _: S, _: usize, from: usize, out: &mut [f32]) {
            out.copy_from_slice(&self.0[from..from + out.len()]);
        }
    }

    #[test]
    fn every_set_rounds_as_the_definition_does() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut rows: Vec<Vec<f32>> =
            [1, 3, 16, 31, 100, 1003].map(|n| (0..n).map(|_| next()).collect()).into();
        // Halves, which go to the even neighbour; rows that vanish; rows of no numbers, early and in the tail.
        rows.push((-254..=254).map(|i| i as f32 / 2.0).collect());
        rows.push(vec![1e-31; 40]);
        rows.push(vec![0.0; 5]);
        rows.push((0..40).map(|i| if i == 3 { f32::NAN } else { 1.0 }).collect());
        rows.push((0..33).map(|i| if i == 32 { f32::NEG_INFINITY } else { 1.0 }).collect());
        for isa in Isa::available() {
            let kind = Kind::of(Level::detect(isa).unwrap());
            for row in &rows {
                let mut expected = vec![0; row.len()];
                let scale = quantise_row(row, &mut expected);
                let mut found = vec![9i8; row.len().next_multiple_of(64)];
                let q = quantise(kind, &One(row.clone()), 0, &mut vec![0.0; row.len()], &mut found);
                if scale.is_nan() {
                    assert!(q.scale.is_nan(), "{isa}: {row:?}");
                    continue;
                }
                assert_eq!(&found[..row.len()], &expected, "{isa}");
                assert!(found[row.len()..].iter().all(|&b| b == 0), "{isa}");
                let sum = expected.iter().map(|&b| i32::from(b)).sum();
                assert_eq!(q, Quantised { scale, sum }, "{isa}");
            }
        }
    }
}

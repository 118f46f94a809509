//! Elementary functions on vectors.

use crate::simd::Simd;

/// `exp(x)` to about 1 ulp; 0 below -104, infinity above 88.8.
///
/// `x = n·ln 2 + r` with integer `n` and `|r| <= ln 2 / 2`: a polynomial approximates `exp(r)`, which is scaled by `2^n`.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // ln 2 in two parts; the first has few enough bits for n · LN2_HIGH to be exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = s.max(s.splat(-104.0), s.min(s.splat(89.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HIGH), x);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut p = s.splat(EXP_COEFFICIENTS[0]);
    for &c in &EXP_COEFFICIENTS[1..] {
        p = s.fma(p, r, s.splat(c));
    }
    // 1 + r + r²·p, the small terms first.
    let p = s.add(s.fma(s.mul(r, r), p, r), s.splat(1.0));
    s.mul_exp2(p, n)
}

/// `2^x` for `x <= 0`, to 4e-6: for weights that are then rounded to bf16, at half the cost of [`exp`].
#[cfg(any(test, target_arch = "x86_64"))]
#[inline(always)]
pub(crate) fn exp2_approx<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.splat(-252.0), x);
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(EXP2_COEFFICIENTS[0]);
    for &c in &EXP2_COEFFICIENTS[1..] {
        p = s.fma(p, r, s.splat(c));
    }
    s.mul_exp2(p, n)
}

/// `2^r` on `|r| <= 0.5`, highest power first.
#[cfg(any(test, target_arch = "x86_64"))]
const EXP2_COEFFICIENTS: [f32; 5] =
    [9.570_102e-3, 5.591_786_3e-2, 2.402_474_4e-1, 6.931_218e-1, 9.999_993e-1];

/// `(exp(r) - 1 - r) / r²` on `|r| <= 0.3466`, highest power first.
const EXP_COEFFICIENTS: [f32; 5] = [1.381_453_3e-3, 8.368_749e-3, 4.166_839e-2, 1.666_652e-1, 4.999_999_3e-1];

/// `x / (1 + exp(-x))`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let negated = s.sub(s.splat(0.0), x);
    s.div(x, s.add(s.splat(1.0), exp(s, negated)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{read, write};
    use crate::isa::{Isa, Level};
    use crate::simd::dispatch;

    #[inline(always)]
    fn exp_kernel<S: Simd>(s: S, x: &[f32], y: &mut [f32]) {
        for i in (0..x.len()).step_by(S::LANES) {
            write(s, y, i, exp(s, read(s, x, i)));
        }
    }

    dispatch! {
        fn exp_slice(x: &[f32], y: &mut [f32]) => exp_kernel;
    }

    #[test]
    fn exp_is_right_to_2e_7_on_every_set() {
        let x: Vec<f32> = (0..2_000_000).map(|i| -87.0 + i as f32 * (175.5 / 2e6)).collect();
        let mut y = vec![0.0; x.len()];
        for isa in Isa::available() {
            exp_slice(Level::detect(isa).unwrap(), &x, &mut y);
            let error = |(x, y): (&f32, &f32)| (f64::from(*y) / f64::from(*x).exp() - 1.0).abs();
            let worst = x.iter().zip(&y).map(error).fold(0.0, f64::max);
            assert!(worst < 2e-7, "{isa}: {worst:e}");
        }
    }

    #[inline(always)]
    fn exp2_kernel<S: Simd>(s: S, x: &[f32], y: &mut [f32]) {
        for i in (0..x.len()).step_by(S::LANES) {
            write(s, y, i, exp2_approx(s, read(s, x, i)));
        }
    }

    dispatch! {
        fn exp2_slice(x: &[f32], y: &mut [f32]) => exp2_kernel;
    }

    #[test]
    fn exp2_approx_is_right_to_4e_6_vanishes_and_keeps_nan() {
        let mut x: Vec<f32> = (0..100_000).map(|i| i as f32 * -1.2e-3).collect();
        x.extend([-1e30, f32::NEG_INFINITY, f32::NAN]);
        let mut y = vec![7.0; x.len()];
        for isa in Isa::available() {
            exp2_slice(Level::detect(isa).unwrap(), &x, &mut y);
            let error = |(x, y): (&f32, &f32)| (f64::from(*y) / f64::from(*x).exp2() - 1.0).abs();
            let worst = x.iter().zip(&y).take(100_000).map(error).fold(0.0, f64::max);
            assert!(worst < 4e-6, "{isa}: {worst:e}");
            assert!(y[100_000] < 1e-38 && y[100_001] < 1e-38 && y[100_002].is_nan(), "{isa}");
        }
    }

    #[test]
    fn exp_reaches_zero_and_infinity_and_keeps_nan() {
        let x = [-1e30, f32::NEG_INFINITY, -104.0, -88.0, 0.0, 88.7, 89.0, f32::INFINITY, f32::NAN];
        for isa in Isa::available() {
            let mut y = [7.0; 9];
            exp_slice(Level::detect(isa).unwrap(), &x, &mut y);
            assert_eq!(y[0], 0.0, "{isa}");
            assert_eq!(y[1], 0.0);
            assert!(y[2] < 2e-45 && y[3] > 0.0 && y[3] < 1e-38);
            assert_eq!(y[4], 1.0);
            assert!((y[5] / 88.7f32.exp() - 1.0).abs() < 1e-6);
            assert_eq!((y[6], y[7]), (f32::INFINITY, f32::INFINITY));
            assert!(y[8].is_nan());
        }
    }
}

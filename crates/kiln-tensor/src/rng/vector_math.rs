//! The single-precision logarithm, sine and cosine of torch's vectorized normal draw.
//!
//! These are the Cephes polynomials with fused multiply-adds, in the order in which torch's x86 build evaluates them. A
//! more accurate function would be worse: it differs from torch in the last bit of one value in seven.

use super::mul_add::MulAdd;

/// Natural logarithm of a positive, normal `x`.
#[inline(always)]
pub(super) fn ln<M: MulAdd>(x: f32) -> f32 {
    const P: [f32; 9] = [
        0.070_376_836,
        -0.115_146_1,
        0.116_769_984,
        -0.124_201_41,
        0.142_493_23,
        -0.166_680_57,
        0.200_007_14,
        -0.249_999_94,
        0.333_333_3,
    ];
    // ln 2 in two parts: the high part has few bits, so that its product with the exponent is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    let bits = x.to_bits();
    let mantissa = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000); // in [0.5, 1)
    let small = mantissa < std::f32::consts::FRAC_1_SQRT_2;
    let exponent = (bits >> 23) as i32 as f32 - if small { 127.0 } else { 126.0 };
    let x = (mantissa - 1.0) + if small { mantissa } else { 0.0 };

    let square = x * x;
    let poly = P[1..].iter().fold(P[0], |y, &p| M::mul_add(y, x, p)) * x;
    let tail = M::mul_add(poly, square, exponent * LN2_LOW) - 0.5 * square;
    M::mul_add(exponent, LN2_HIGH, x + tail)
}

/// Sine and cosine of `x` in `[0, 2π]`.
#[inline(always)]
pub(super) fn sin_cos<M: MulAdd>(x: f32) -> (f32, f32) {
    // π/4 in three parts, subtracted one after the other.
    const QUARTER_PI: [f32; 3] = [0.785_156_25, 2.418_756_5e-4, 3.774_895e-8];
    const SIN: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
    const COS: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];

    // The octant, rounded up to an even number: x - octant·π/4 lies in [-π/4, π/4].
    let octant = ((x * (4.0 / std::f32::consts::PI)) as i32 + 1) & !1;
    let x = QUARTER_PI.iter().fold(x, |x, &part| M::mul_add(octant as f32, -part, x));

    let square = x * x;
    let poly = |c: &[f32; 3]| M::mul_add(M::mul_add(c[0], square, c[1]), square, c[2]) * square;
    let cos = M::mul_add(poly(&COS), square, -0.5 * square) + 1.0;
    let sin = M::mul_add(poly(&SIN), x, x);

    // Quarters of a turn: (sin, cos), (cos, -sin), (-sin, -cos), (-cos, sin).
    let quarters = (octant / 2) % 4;
    let (first, second) = if quarters % 2 == 0 { (sin, cos) } else { (cos, sin) };
    let negate_if = |x: f32, negative: bool| f32::from_bits(x.to_bits() ^ (u32::from(negative) << 31));
    (negate_if(first, quarters >= 2), negate_if(second, quarters == 1 || quarters == 2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::mul_add::Software;

    #[test]
    fn the_logarithm_is_right_to_two_units_in_the_last_place() {
        for i in 1..=100_000u32 {
            let x = i as f32 / 100_000.0;
            let exact = f64::from(x).ln();
            let error = (f64::from(ln::<Software>(x)) - exact).abs();
            assert!(error <= 1.2e-7 * exact.abs().max(0.1) * 2.0, "ln({x}) is off by {error}");
        }
        assert_eq!(ln::<Software>(1.0), 0.0);
    }

    #[test]
    fn sine_and_cosine_are_right_in_all_four_quadrants() {
        for i in 0..=100_000u32 {
            let x = i as f32 / 100_000.0 * std::f32::consts::TAU;
            let (sin, cos) = sin_cos::<Software>(x);
            assert!((f64::from(sin) - f64::from(x).sin()).abs() < 1.3e-7, "sin({x}) = {sin}");
            assert!((f64::from(cos) - f64::from(x).cos()).abs() < 1.3e-7, "cos({x}) = {cos}");
        }
    }
}

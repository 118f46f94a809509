//! Floats of 16, 8 and 4 bits, by their bits: plain arithmetic, which a compiler can do for many at once.

/// A power of two.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// IEEE half precision.
#[inline(always)]
pub(super) fn half(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    wide(bits, 15, 10, 15, bits & 0x7c00 == 0x7c00, (bits & 0x3ff) << 13)
}

/// 4 exponent bits, 3 of fraction; no infinity, and all ones is NaN.
#[inline(always)]
pub fn from_e4m3(byte: u8) -> f32 {
    let bits = u32::from(byte);
    wide(bits, 7, 3, 7, bits & 0x7f == 0x7f, 1 << 22)
}

/// 5 exponent bits, 2 of fraction: the upper byte of a half.
#[inline(always)]
pub fn from_e5m2(byte: u8) -> f32 {
    half([0, byte])
}

/// The values of the 4-bit codes: sign, 2 exponent bits, 1 of fraction.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A float of `sign` bits below its sign and `fraction` bits. An exponent that is too small by a constant is put right
/// by a factor, which also normalises what has no leading one.
#[inline(always)]
fn wide(bits: u32, sign: u32, fraction: u32, bias: i32, special: bool, payload: u32) -> f32 {
    let negative = (bits >> sign) << 31;
    let magnitude = f32::from_bits((bits & ((1 << sign) - 1)) << (23 - fraction)) * power(127 - bias);
    let bits = if special { 0x7f80_0000 | payload } else { magnitude.to_bits() };
    f32::from_bits(bits | negative)
}

/// The nearest 8-bit float with 3 bits of fraction, ties to even; what is beyond ±448 becomes that, NaN stays.
pub fn to_e4m3(x: f32) -> u8 {
    if x.is_nan() { 0x7f } else { round(x, 3, -6, 448.0, 0x80) }
}

/// The nearest 4-bit float, ties to even; what is beyond ±6 becomes that.
pub fn to_e2m1(x: f32) -> u8 {
    round(x, 1, 0, 6.0, 0x8)
}

/// Beyond this a float has no fraction left, so that a sum with it is rounded.
const WHOLE: f32 = 12_582_912.0;

/// The nearest integer, ties to even, of a number below 2²² (larger ones stay as they are): what
/// [`f32::round_ties_even`] gives, which is a function call a number on machines without an instruction for it.
#[inline(always)]
pub fn nearest(x: f32) -> f32 {
    if x.abs() < 4_194_304.0 { (x + WHOLE) - WHOLE } else { x }
}

/// [`nearest`] of a number from 0 to 2²² as an integer, without a conversion that looks out for larger ones.
#[inline(always)]
fn nearest_code(x: f32) -> i32 {
    (x + WHOLE).to_bits() as i32 - WHOLE.to_bits() as i32
}

/// The code of the nearest number with `fraction` bits after the first and no exponent below `lowest`.
fn round(x: f32, fraction: u32, lowest: i32, largest: f32, sign: u8) -> u8 {
    let magnitude = x.abs().min(largest);
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(lowest);
    // Exact: a power of two. A result of twice the leading one is the next exponent's first code, as it should be.
    let steps = nearest_code(magnitude * power(fraction as i32 - exponent));
    let code = ((exponent - lowest) << fraction) + steps;
    code as u8 | if x.is_sign_negative() { sign } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_integer_is_that_of_the_standard_library() {
        let mut random = 1u32;
        for _ in 0..100_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(random);
            if x.is_finite() && x.abs() < 4_194_304.0 {
                assert_eq!(nearest(x), x.round_ties_even(), "{x:e}");
            }
        }
        for half in -9..9 {
            let x = half as f32 + 0.5;
            assert_eq!(nearest(x), x.round_ties_even());
        }
    }

    #[test]
    fn halves_are_what_half_says() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (half(bits.to_le_bytes()), half::f16::from_bits(bits).to_f32());
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{bits:#x}");
            assert_eq!(found.is_sign_negative(), expected.is_sign_negative(), "{bits:#x}");
        }
    }

    #[test]
    fn bytes_are_the_floats_their_fields_say() {
        let by_fields = |byte: u8| {
            let (exponent, fraction) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
            let value = match exponent {
                0 => fraction / 8.0 * 2f32.powi(-6),
                _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
            };
            if byte & 0x80 == 0 { value } else { -value }
        };
        for byte in (0..=255).filter(|b| b & 0x7f != 0x7f) {
            assert_eq!(from_e4m3(byte), by_fields(byte), "{byte:#x}");
            assert_eq!(to_e4m3(from_e4m3(byte)), byte, "{byte:#x}");
        }
        assert!(from_e4m3(0x7f).is_nan() && from_e4m3(0xff).is_nan());
        assert_eq!(
            (from_e5m2(0x7b), from_e5m2(0x7c), from_e5m2(1)),
            (57344.0, f32::INFINITY, 2f32.powi(-16))
        );
    }

    #[test]
    fn rounding_goes_to_the_nearest_and_ties_to_even() {
        let nearest = |x: f32| {
            let codes = (0..0x7f).filter(|c| *c < 0x7f);
            codes.min_by(|&a, &b| {
                let [da, db] = [a, b].map(|c| (from_e4m3(c) - x).abs());
                da.total_cmp(&db).then_with(|| (a & 1).cmp(&(b & 1)))
            })
        };
        for i in 0..20_000 {
            let x = i as f32 * 0.03 * 0.001f32.powi(i % 3);
            assert_eq!(Some(to_e4m3(x)), nearest(x.min(448.0)), "{x}");
            assert_eq!(to_e4m3(-x), to_e4m3(x) | 0x80, "{x}");
        }
        assert_eq!((to_e4m3(f32::INFINITY), to_e4m3(f32::NAN)), (0x7e, 0x7f));
        for (code, value) in E2M1.iter().enumerate() {
            assert_eq!(usize::from(to_e2m1(*value)), code);
        }
        // Halfway: 0.25 → 0, 1.25 → 1, 1.75 → 2, 2.5 → 2, 5 → 4.
        assert_eq!([0.25, 1.25, 1.75, 2.5, 5.0, 9.0].map(to_e2m1), [0, 2, 4, 4, 6, 7]);
    }
}

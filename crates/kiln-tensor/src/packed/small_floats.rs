//! Conversions of f16, fp8 (e4m3, e5m2) and fp4 (e2m1). Plain arithmetic on bits, so that the compiler vectorizes them.

/// `2^exponent`.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Decodes an IEEE f16.
#[inline(always)]
pub(super) fn half(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    widen(bits, 15, 10, 15, bits & 0x7c00 == 0x7c00, (bits & 0x3ff) << 13)
}

/// Decodes an e4m3: 4 exponent bits, 3 mantissa bits, no infinity; all ones is NaN.
#[inline(always)]
pub fn from_e4m3(byte: u8) -> f32 {
    let bits = u32::from(byte);
    widen(bits, 7, 3, 7, bits & 0x7f == 0x7f, 1 << 22)
}

/// Decodes an e5m2: the upper byte of an f16.
#[inline(always)]
pub(crate) fn from_e5m2(byte: u8) -> f32 {
    half([0, byte])
}

/// The values of the e2m1 codes: sign, 2 exponent bits, 1 mantissa bit.
pub(super) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Decodes an e2m1.
pub(crate) fn from_e2m1(code: u8) -> f32 {
    E2M1[usize::from(code & 15)]
}

/// Decodes a float with `sign` bits below its sign bit and a mantissa of `fraction` bits.
///
/// The bits are shifted to their position in an f32; a multiplication then corrects the exponent bias, which also
/// normalizes subnormals. `special` values (infinity, NaN) get the mantissa `payload`.
#[inline(always)]
fn widen(bits: u32, sign: u32, fraction: u32, bias: i32, special: bool, payload: u32) -> f32 {
    let negative = (bits >> sign) << 31;
    let magnitude = f32::from_bits((bits & ((1 << sign) - 1)) << (23 - fraction)) * power(127 - bias);
    let bits = if special { 0x7f80_0000 | payload } else { magnitude.to_bits() };
    f32::from_bits(bits | negative)
}

/// Encodes the nearest e4m3, ties to even. Saturates at ±448; NaN stays NaN.
pub fn to_e4m3(x: f32) -> u8 {
    if x.is_nan() { 0x7f } else { encode(x, 3, -6, 448.0, 0x80) }
}

/// Encodes the nearest e2m1, ties to even. Saturates at ±6.
pub fn to_e2m1(x: f32) -> u8 {
    encode(x, 1, 0, 6.0, 0x8)
}

/// 1.5 · 2²³. A float of this size has no fraction, so adding it rounds to an integer.
const ROUNDER: f32 = 12_582_912.0;

/// Rounds a number below 2²² in magnitude to the nearest integer, ties to even; larger ones are returned as they are.
///
/// Same result as [`f32::round_ties_even`], which is a function call on targets without a rounding instruction.
#[inline(always)]
pub fn round_ties_even(x: f32) -> f32 {
    if x.abs() < 4_194_304.0 { (x + ROUNDER) - ROUNDER } else { x }
}

/// [`round_ties_even`] of a number from 0 to 2²², as an integer; avoids the saturating conversion.
#[inline(always)]
fn round_to_integer(x: f32) -> i32 {
    (x + ROUNDER).to_bits() as i32 - ROUNDER.to_bits() as i32
}

/// Encodes the nearest float with `fraction` mantissa bits and no exponent below `lowest`.
fn encode(x: f32, fraction: u32, lowest: i32, largest: f32, sign: u8) -> u8 {
    let magnitude = x.abs().min(largest);
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(lowest);
    // The product is exact: a power of two. Rounding up to the next power of two carries into the exponent.
    let steps = round_to_integer(magnitude * power(fraction as i32 - exponent));
    let code = ((exponent - lowest) << fraction) + steps;
    code as u8 | if x.is_sign_negative() { sign } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_equals_the_standard_library() {
        let mut random = 1u32;
        for _ in 0..100_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(random);
            if x.is_finite() && x.abs() < 4_194_304.0 {
                assert_eq!(round_ties_even(x), x.round_ties_even(), "{x:e}");
            }
        }
        for half in -9..9 {
            let x = half as f32 + 0.5;
            assert_eq!(round_ties_even(x), x.round_ties_even());
        }
    }

    #[test]
    fn f16_equals_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (half(bits.to_le_bytes()), half::f16::from_bits(bits).to_f32());
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{bits:#x}");
            assert_eq!(found.is_sign_negative(), expected.is_sign_negative(), "{bits:#x}");
        }
    }

    #[test]
    fn fp8_values_follow_from_their_fields() {
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

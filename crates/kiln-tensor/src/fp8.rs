//! Row-wise quantization to 8-bit floats (e4m3), for fp8 matmuls as `kiln-ops` defines them.
//!
//! ```
//! use kiln_tensor::fp8;
//!
//! let mut q = [0.0; 3];
//! let scale = fp8::quantize_row(&[4.48, -2.1, 0.0], &mut q);
//! assert_eq!((q, scale), ([448.0, -208.0, 0.0], 0.01));
//! ```

use crate::int8::ZERO_ROW_LIMIT;

/// The largest finite e4m3 value.
pub const MAX: f32 = 448.0;

/// Rounds `x` to the nearest e4m3 value, ties to even; saturates at ±[`MAX`].
fn round(x: f32) -> f32 {
    // Below 2⁻⁶, values are 2⁻⁹ apart; above, an eighth of their power of two.
    let exponent = ((x.to_bits() >> 23 & 0xff) as i32 - 127).max(-6);
    let step = f32::from_bits(((exponent - 3 + 127) as u32) << 23);
    ((x / step).round_ties_even() * step).clamp(-MAX, MAX)
}

/// Quantizes a row so that its largest magnitude becomes [`MAX`]; returns the scale, with `x ≈ out · scale`.
///
/// A row with NaN or infinity gets a NaN scale, a row below [`ZERO_ROW_LIMIT`] a scale of 0.
pub fn quantize_row(x: &[f32], out: &mut [f32]) -> f32 {
    let largest = f32::from_bits(x.iter().fold(0, |m: u32, x| m.max(x.abs().to_bits())));
    let (inverse, scale) = match largest {
        m if !m.is_finite() => (0.0, f32::NAN),
        m if m < ZERO_ROW_LIMIT => (0.0, 0.0),
        m => (MAX / m, m / MAX),
    };
    for (out, x) in out.iter_mut().zip(x) {
        *out = if x.is_finite() { round(x * inverse) } else { 0.0 };
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_values_are_kept_and_others_round_to_the_nearest() {
        for bits in 0..0x7f_u32 {
            // Sign, four bits of exponent with a bias of 7, three bits of fraction.
            let (exponent, fraction) = ((bits >> 3) as i32, (bits & 7) as f32);
            let number = match exponent {
                0 => fraction * 2f32.powi(-9),
                e => (1.0 + fraction / 8.0) * 2f32.powi(e - 7),
            };
            assert_eq!(round(number), number);
            assert_eq!(round(-number * 1.0001), -number);
        }
        assert_eq!([round(17.0), round(19.0), round(500.0), round(0.0009)], [16.0, 20.0, 448.0, 0.0]);
    }

    #[test]
    fn rows_with_infinity_or_only_zeros_get_special_scales() {
        let mut q = [1.0; 2];
        assert!(quantize_row(&[f32::INFINITY, 1.0], &mut q).is_nan());
        assert_eq!((quantize_row(&[0.0, 0.0], &mut q), q), (0.0, [0.0; 2]));
    }
}

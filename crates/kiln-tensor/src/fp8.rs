//! Eight-bit floats (e4m3) with one scale for a row: how weights and activations are rounded for a product in 8-bit floats
//! (`kiln-ops` defines it).
//!
//! ```
//! use kiln_tensor::fp8;
//!
//! let mut q = [0.0; 3];
//! let scale = fp8::quantise_row(&[4.48, -2.1, 0.0], &mut q);
//! assert_eq!((q, scale), ([448.0, -208.0, 0.0], 0.01));
//! ```

use crate::int8::VANISHING;

/// The largest number that e4m3 has.
pub const LARGEST: f32 = 448.0;

/// The number of e4m3 next to `x`, ties to even; beyond the largest there is none but that.
pub fn round(x: f32) -> f32 {
    // Below 2⁻⁶ numbers are 2⁻⁹ apart, above it an eighth of their power of two.
    let exponent = ((x.to_bits() >> 23 & 0xff) as i32 - 127).max(-6);
    let step = f32::from_bits(((exponent - 3 + 127) as u32) << 23);
    ((x / step).round_ties_even() * step).clamp(-LARGEST, LARGEST)
}

/// Rounds a row to multiples of its scale, which it gives: the largest element becomes the largest number. A row that holds
/// what is no number gets a scale of NaN, and one that vanishes a scale of 0.
pub fn quantise_row(x: &[f32], out: &mut [f32]) -> f32 {
    let largest = f32::from_bits(x.iter().fold(0, |m: u32, x| m.max(x.abs().to_bits())));
    let (inverse, scale) = match largest {
        m if !m.is_finite() => (0.0, f32::NAN),
        m if m < VANISHING => (0.0, 0.0),
        m => (LARGEST / m, m / LARGEST),
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
    fn numbers_of_e4m3_stay_and_others_go_to_their_neighbour() {
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
    fn a_row_without_numbers_shows() {
        let mut q = [1.0; 2];
        assert!(quantise_row(&[f32::INFINITY, 1.0], &mut q).is_nan());
        assert_eq!((quantise_row(&[0.0, 0.0], &mut q), q), (0.0, [0.0; 2]));
    }
}

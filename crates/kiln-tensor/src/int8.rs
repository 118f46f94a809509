//! Eight-bit numbers with one scale for a row: how weights are stored, and activations rounded for a product in integers
//! (`kiln-ops` defines it).
//!
//! ```
//! use kiln_tensor::int8;
//!
//! let mut q = [0; 3];
//! let scale = int8::quantise_row(&[0.5, -1.27, 0.004], &mut q);
//! assert_eq!((q, scale), ([50, -127, 0], 0.01));
//! ```

/// The largest integer used; -128 has no counterpart and is left out.
pub const LARGEST: f32 = 127.0;

/// A row whose largest element is below this is a row of zeros: its inverse would leave the range of f32.
pub const VANISHING: f32 = 1e-30;

/// The widest weight: the largest sum of so many products of two bytes is just inside an i32.
pub const MOST_COLUMNS: usize = 1 << 17;

/// What turns a row into integers, and what turns them back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowScale {
    /// The factor before rounding.
    pub inverse: f32,
    /// What an integer stands for.
    pub scale: f32,
}

impl RowScale {
    /// For a row whose largest absolute value is `largest`. A row that holds NaN or infinity gets a scale of NaN, so that
    /// it shows in the result.
    pub fn new(largest: f32) -> RowScale {
        match largest {
            m if !m.is_finite() => RowScale { inverse: 0.0, scale: f32::NAN },
            m if m < VANISHING => RowScale { inverse: 0.0, scale: 0.0 },
            m => RowScale { inverse: LARGEST / m, scale: m / LARGEST },
        }
    }

    /// The integer for `x`, ties to even. What is no number gets any; its scale tells.
    pub fn round(self, x: f32) -> i8 {
        // Adding 1.5 · 2²³ drops the fraction, and leaves the integer in the low byte: no call of a function, which would
        // keep a loop from being vectorised.
        const MAGIC: f32 = 12_582_912.0;
        (x * self.inverse + MAGIC).to_bits() as i8
    }
}

/// Rounds a row to integers and gives its scale.
pub fn quantise_row(x: &[f32], out: &mut [i8]) -> f32 {
    // Without its sign, a float's bits are in the order of its value, infinity and NaN above all.
    let largest = x.iter().fold(0, |m: u32, x| m.max(x.abs().to_bits()));
    let row = RowScale::new(f32::from_bits(largest));
    out.iter_mut().zip(x).for_each(|(out, &x)| *out = row.round(x));
    row.scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantised<const N: usize>(x: [f32; N]) -> ([i8; N], f32) {
        let mut out = [7; N];
        let scale = quantise_row(&x, &mut out);
        (out, scale)
    }

    #[test]
    fn the_largest_element_becomes_127() {
        assert_eq!(quantised([254.0, -254.0, 1.0, 3.0]), ([127, -127, 0, 2], 2.0));
        assert_eq!(quantised([-1e-29, 0.0]), ([-127, 0], 1e-29 / 127.0));
        let (q, scale) = quantised([f32::MAX, -f32::MAX]);
        assert_eq!((q, scale.is_finite()), ([127, -127], true));
    }

    #[test]
    fn halves_go_to_the_even_neighbour() {
        let row = RowScale { inverse: 1.0, scale: 1.0 };
        for i in -254..=254 {
            let x = i as f32 / 2.0;
            assert_eq!(f32::from(row.round(x)), x.round_ties_even(), "{x}");
        }
    }

    #[test]
    fn rows_of_almost_nothing_are_zero() {
        assert_eq!(quantised([0.0, -0.0]), ([0, 0], 0.0));
        assert_eq!(quantised([1e-31, -1e-38]), ([0, 0], 0.0));
    }

    #[test]
    fn what_is_no_number_shows_in_the_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for row in [[bad, 1.0], [1.0, bad]] {
                assert!(quantised(row).1.is_nan(), "{bad}");
            }
        }
    }
}

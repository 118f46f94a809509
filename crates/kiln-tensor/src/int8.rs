//! Row-wise int8 quantization of weights and activations, for int8 matmuls as `kiln-ops` defines them.
//!
//! ```
//! use kiln_tensor::int8;
//!
//! let mut q = [0; 3];
//! let scale = int8::quantize_row(&[0.5, -1.27, 0.004], &mut q);
//! assert_eq!((q, scale), ([50, -127, 0], 0.01));
//! ```

use crate::{HostTensor, Result, Rotation, vector};

/// The largest integer used; the range is symmetric, so -128 is not used.
pub const MAX: f32 = 127.0;

/// A row whose largest magnitude is below this counts as zeros: the inverse of its scale would overflow f32.
pub const ZERO_ROW_LIMIT: f32 = 1e-30;

/// The largest number of columns of an int8 weight: the largest sum of so many products just fits an i32.
pub const MAX_COLS: usize = 1 << 17;

/// The scale of a quantized row, and its inverse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowScale {
    /// The factor that maps a value to its integer, before rounding.
    pub inverse: f32,
    /// The factor that maps an integer back to its value.
    pub scale: f32,
}

impl RowScale {
    /// The scale of a row whose largest magnitude is `largest`. NaN or infinity gives a NaN scale, so that it shows in
    /// the result.
    pub fn new(largest: f32) -> RowScale {
        match largest {
            m if !m.is_finite() => RowScale { inverse: 0.0, scale: f32::NAN },
            m if m < ZERO_ROW_LIMIT => RowScale { inverse: 0.0, scale: 0.0 },
            m => RowScale { inverse: MAX / m, scale: m / MAX },
        }
    }

    /// Quantizes `x`, ties to even. NaN and infinity give an arbitrary integer; their row has a NaN scale.
    pub fn round(self, x: f32) -> i8 {
        // Adding 1.5 · 2²³ drops the fraction and leaves the integer in the low byte. A call of a rounding function
        // would prevent vectorization.
        const MAGIC: f32 = 12_582_912.0;
        (x * self.inverse + MAGIC).to_bits() as i8
    }
}

/// Quantizes a row; returns its scale, with `x ≈ out · scale`.
pub fn quantize_row(x: &[f32], out: &mut [i8]) -> f32 {
    let row = RowScale::new(vector::max_abs_or_nan(x));
    out.iter_mut().zip(x).for_each(|(out, &x)| *out = row.round(x));
    row.scale
}

/// Rotates and quantizes the rows of a float matrix from `first` on, as many as there are `scales`. Returns the sums of their
/// squared errors and of their squared values.
pub fn quantize_rows(
    matrix: &HostTensor,
    first: usize,
    rotation: Rotation,
    bytes: &mut [u8],
    scales: &mut [f32],
) -> Result<[f64; 2]> {
    let cols = matrix.shape().last();
    let (mut integers, mut squares) = (vec![0i8; cols], [0f64; 2]);
    for (i, (bytes, scale)) in bytes.chunks_exact_mut(cols).zip(scales).enumerate() {
        let row = matrix.rows(first + i..first + i + 1)?;
        let mut row = row.to_f32()?;
        if rotation != Rotation::None {
            rotation.rotate(row.to_mut());
        }
        *scale = quantize_row(&row, &mut integers);
        let mut sums = [0f32; 2];
        for ((out, &q), &x) in bytes.iter_mut().zip(&integers).zip(row.iter()) {
            *out = q as u8;
            let error = f32::from(q) * *scale - x;
            sums = [sums[0] + error * error, sums[1] + x * x];
        }
        squares = [squares[0] + f64::from(sums[0]), squares[1] + f64::from(sums[1])];
    }
    Ok(squares)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantize<const N: usize>(x: [f32; N]) -> ([i8; N], f32) {
        let mut out = [7; N];
        let scale = quantize_row(&x, &mut out);
        (out, scale)
    }

    #[test]
    fn the_largest_element_becomes_127() {
        assert_eq!(quantize([254.0, -254.0, 1.0, 3.0]), ([127, -127, 0, 2], 2.0));
        assert_eq!(quantize([-1e-29, 0.0]), ([-127, 0], 1e-29 / 127.0));
        let (q, scale) = quantize([f32::MAX, -f32::MAX]);
        assert_eq!((q, scale.is_finite()), ([127, -127], true));
    }

    #[test]
    fn halves_round_to_even() {
        let row = RowScale { inverse: 1.0, scale: 1.0 };
        for i in -254..=254 {
            let x = i as f32 / 2.0;
            assert_eq!(f32::from(row.round(x)), x.round_ties_even(), "{x}");
        }
    }

    #[test]
    fn tiny_rows_become_zero() {
        assert_eq!(quantize([0.0, -0.0]), ([0, 0], 0.0));
        assert_eq!(quantize([1e-31, -1e-38]), ([0, 0], 0.0));
    }

    #[test]
    fn nan_and_infinity_give_a_nan_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for row in [[bad, 1.0], [1.0, bad]] {
                assert!(quantize(row).1.is_nan(), "{bad}");
            }
        }
    }
}

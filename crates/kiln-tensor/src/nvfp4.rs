//! Row-wise quantization to nvfp4, for nvfp4 matmuls as `kiln-ops` defines them: 4-bit floats (e2m1), an e4m3 scale for each
//! block of 16 and an f32 scale for the row.
//!
//! ```
//! use kiln_tensor::nvfp4;
//!
//! let mut row = [0.0; 32];
//! row[..3].copy_from_slice(&[26.88, -9.0, 1.0]);
//! row[16] = -0.12;
//! let mut q = [0.0; 32];
//! // The first block's values are multiples of 448, the second one's of 2.
//! assert_eq!(nvfp4::quantize_row(&row, &mut q), 0.01);
//! assert_eq!((q[0], q[1], q[2], q[16]), (2688.0, -896.0, 0.0, -12.0));
//! ```

use crate::int8::ZERO_ROW_LIMIT;
use crate::packed::BLOCK_COLS;
use crate::packed::encode::{MAX_E2M1, MAX_E4M3};
use crate::packed::small_floats::{from_e2m1, from_e4m3, to_e2m1, to_e4m3};
use crate::vector;

/// The largest value times its block's scale.
pub const MAX: f32 = MAX_E4M3 * MAX_E2M1;

/// Quantizes a row of whole blocks so that its largest magnitude becomes [`MAX`]; writes the values times their block's scale,
/// and returns the row's scale, with `x ≈ out · scale`.
///
/// A row with NaN or infinity gets a NaN scale, a row below [`ZERO_ROW_LIMIT`] a scale of 0.
pub fn quantize_row(x: &[f32], out: &mut [f32]) -> f32 {
    let (inverse, scale) = match vector::max_abs_or_nan(x) {
        m if !m.is_finite() => (0.0, f32::NAN),
        m if m < ZERO_ROW_LIMIT => (0.0, 0.0),
        m => (MAX / m, m / MAX),
    };
    for (x, out) in x.chunks(BLOCK_COLS).zip(out.chunks_mut(BLOCK_COLS)) {
        let block =
            if inverse > 0.0 { from_e4m3(to_e4m3(vector::max_abs(x) * inverse / MAX_E2M1)) } else { 0.0 };
        let factor = if block > 0.0 { inverse / block } else { 0.0 };
        for (out, x) in out.iter_mut().zip(x) {
            *out = if block > 0.0 { from_e2m1(to_e2m1(x * factor)) * block } else { 0.0 };
        }
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_their_own_scales() {
        // The second block is 1/448 of the first, the third too small for any scale.
        let mut x = [0.0; 3 * BLOCK_COLS];
        for (i, x) in x.iter_mut().enumerate() {
            *x = [6.0, 6.0 / 448.0, 6.0 / 448.0 / 2048.0][i / BLOCK_COLS]
                * if i % 2 == 0 { 1.0 } else { -0.25 };
        }
        let mut q = [1.0; 3 * BLOCK_COLS];
        let scale = quantize_row(&x, &mut q);
        assert_eq!(scale, 6.0 / MAX);
        assert_eq!(
            (&q[..2], &q[16..18], &q[32..34]),
            (&[2688.0, -672.0][..], &[6.0, -1.5][..], &[0.0, 0.0][..])
        );
    }

    #[test]
    fn rows_with_infinity_or_only_zeros_get_special_scales() {
        let mut q = [1.0; BLOCK_COLS];
        for special in [f32::INFINITY, f32::NAN] {
            let mut x = [1.0; BLOCK_COLS];
            x[3] = special;
            assert!(quantize_row(&x, &mut q).is_nan());
            assert_eq!(q, [0.0; BLOCK_COLS]);
        }
        assert_eq!((quantize_row(&[1e-31; BLOCK_COLS], &mut q), q), (0.0, [0.0; BLOCK_COLS]));
    }
}

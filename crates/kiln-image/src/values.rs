//! Conversion between bytes and the floats that the autoencoders work with.
//!
//! In f32 and in diffusers' order of operations, so that the same bytes give the same bits.

use crate::{Error, Result, RgbImage};

/// Converts to `[height, width, 3]` in [-1, 1], the FLUX.2 autoencoder's input.
pub fn to_signed_f32(image: &RgbImage) -> Vec<f32> {
    image.pixels().iter().map(|&v| 2.0 * (f32::from(v) / 255.0) - 1.0).collect()
}

/// Converts to `[height, width, 3]` in [0, 1], TAEF2's input.
pub fn to_unit_f32(image: &RgbImage) -> Vec<f32> {
    image.pixels().iter().map(|&v| f32::from(v) / 255.0).collect()
}

/// Converts from `[height, width, 3]` in [-1, 1]. Values outside are clamped, and halves round to even.
pub fn from_signed_f32(width: u32, height: u32, values: &[f32]) -> Result<RgbImage> {
    from_values(width, height, values, |x| x * 0.5 + 0.5)
}

/// Converts from `[height, width, 3]` in [0, 1]. Values outside are clamped, and halves round to even.
pub fn from_unit_f32(width: u32, height: u32, values: &[f32]) -> Result<RgbImage> {
    from_values(width, height, values, |x| x)
}

fn from_values(width: u32, height: u32, values: &[f32], to_unit: impl Fn(f32) -> f32) -> Result<RgbImage> {
    let expected = (u64::from(width) * u64::from(height)).saturating_mul(3);
    if values.len() as u64 != expected {
        return Err(Error::Pixels { width, height, expected, found: values.len() as u64 });
    }
    // Adding 2²³ rounds halves to even and leaves the integer in the low byte. On baseline x86-64 `round_ties_even` is a
    // function call, and converting would take longer than generating the image on a GPU.
    const MAGIC: f32 = 8_388_608.0;
    let byte = |&x: &f32| (to_unit(x).clamp(0.0, 1.0) * 255.0 + MAGIC).to_bits() as u8;
    RgbImage::new(width, height, values.iter().map(byte).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values and bytes from diffusers 0.42.1's `VaeImageProcessor.postprocess`.
    #[test]
    fn signed_values_become_the_bytes_of_diffusers() {
        let values = [-1.5, -1.0, -0.999, -0.5, -1.0 / 255.0, 0.0, 1e-3, 0.3333, 0.5, 0.996, 1.0, 2.0];
        let image = from_signed_f32(4, 1, &values).unwrap();
        assert_eq!(image.pixels(), [0, 0, 0, 64, 127, 128, 128, 170, 191, 254, 255, 255]);
    }

    #[test]
    fn every_byte_survives_both_ways() {
        let image = RgbImage::new(256, 1, (0..=255).flat_map(|v| [v; 3]).collect()).unwrap();
        assert_eq!(from_signed_f32(256, 1, &to_signed_f32(&image)).unwrap(), image);
        assert_eq!(from_unit_f32(256, 1, &to_unit_f32(&image)).unwrap(), image);
        let values = to_signed_f32(&image);
        assert_eq!((values[0], values[3 * 255]), (-1.0, 1.0));
        // 2 * (1 / 255) - 1 with both results rounded to f32, as numpy and torch compute it.
        assert_eq!(values[3].to_bits(), 0xbf7d_fdfe);
    }

    #[test]
    fn a_wrong_number_of_values_is_rejected() {
        assert!(from_signed_f32(2, 2, &[0.0; 11]).is_err());
        assert!(from_unit_f32(0, 0, &[]).is_err());
    }
}

//! Bytes to the numbers the autoencoders work with, and back.
//!
//! All of it in f32 and in diffusers' order of operations, so that the same bytes give the same bits.

use crate::{Error, Picture, Result};

/// Values from -1 to 1, channels last `[height, width, 3]`: what the FLUX.2 autoencoder sees.
pub fn to_signed_f32(picture: &Picture) -> Vec<f32> {
    picture.pixels().iter().map(|&v| 2.0 * (f32::from(v) / 255.0) - 1.0).collect()
}

/// Values from 0 to 1, channels last `[height, width, 3]`: what TAEF2 sees.
pub fn to_unit_f32(picture: &Picture) -> Vec<f32> {
    picture.pixels().iter().map(|&v| f32::from(v) / 255.0).collect()
}

/// A picture of values from -1 to 1, channels last. Values beyond are cut, and halves round to even.
pub fn from_signed_f32(width: u32, height: u32, values: &[f32]) -> Result<Picture> {
    from_values(width, height, values, |x| x * 0.5 + 0.5)
}

/// A picture of values from 0 to 1, channels last. Values beyond are cut, and halves round to even.
pub fn from_unit_f32(width: u32, height: u32, values: &[f32]) -> Result<Picture> {
    from_values(width, height, values, |x| x)
}

fn from_values(width: u32, height: u32, values: &[f32], to_unit: impl Fn(f32) -> f32) -> Result<Picture> {
    let expected = (u64::from(width) * u64::from(height)).saturating_mul(3);
    if values.len() as u64 != expected {
        return Err(Error::Pixels { width, height, expected, found: values.len() as u64 });
    }
    // Adding 2²³ drops the fraction, halves to even, and leaves the integer in the low byte: rounding is a call of a function
    // where the build is for any x86-64, and takes longer than a GPU needs for the picture.
    const MAGIC: f32 = 8_388_608.0;
    let byte = |&x: &f32| (to_unit(x).clamp(0.0, 1.0) * 255.0 + MAGIC).to_bits() as u8;
    Picture::new(width, height, values.iter().map(byte).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values and bytes as diffusers 0.42.1's `VaeImageProcessor.postprocess` turns the one into the other.
    #[test]
    fn signed_values_become_the_bytes_of_diffusers() {
        let values = [-1.5, -1.0, -0.999, -0.5, -1.0 / 255.0, 0.0, 1e-3, 0.3333, 0.5, 0.996, 1.0, 2.0];
        let picture = from_signed_f32(4, 1, &values).unwrap();
        assert_eq!(picture.pixels(), [0, 0, 0, 64, 127, 128, 128, 170, 191, 254, 255, 255]);
    }

    #[test]
    fn every_byte_survives_both_ways() {
        let picture = Picture::new(256, 1, (0..=255).flat_map(|v| [v; 3]).collect()).unwrap();
        assert_eq!(from_signed_f32(256, 1, &to_signed_f32(&picture)).unwrap(), picture);
        assert_eq!(from_unit_f32(256, 1, &to_unit_f32(&picture)).unwrap(), picture);
        let values = to_signed_f32(&picture);
        assert_eq!((values[0], values[3 * 255]), (-1.0, 1.0));
        // 2 * (1 / 255) - 1 with both results rounded to f32, as numpy and torch compute it.
        assert_eq!(values[3].to_bits(), 0xbf7d_fdfe);
    }

    #[test]
    fn a_wrong_number_of_values_is_refused() {
        assert!(from_signed_f32(2, 2, &[0.0; 11]).is_err());
        assert!(from_unit_f32(0, 0, &[]).is_err());
    }
}

//! The watermark of the Python package `invisible-watermark`, its method `dwtDct`: the bits of a message, again and again, one
//! for every block of 8² pixels.
//!
//! A block has 16 sums of 2² pixels of U (a Haar wavelet's approximation). The largest but the first was moved to a quarter or
//! three quarters between two multiples of 36, which says the bit.

use crate::RgbImage;

const BLOCK: usize = 8;
const SCALE: f32 = 36.0;

/// How well an image's blocks agree with a message: the correlation of the message with the share of ones that the blocks of
/// each bit say. It is almost 1 in an image that was just marked, and below ½ in others.
///
/// The package's reader takes majorities instead, which the content of an image biases.
pub fn block_watermark_agreement(image: &RgbImage, message: &[bool]) -> f32 {
    let columns = image.width() as usize / BLOCK;
    let rows = image.height() as usize / BLOCK;
    if message.is_empty() || columns * rows < message.len() {
        return 0.0;
    }
    let mut votes = vec![[0u32; 2]; message.len()];
    for block in 0..columns * rows {
        let says_one = bit_of(image, block % columns * BLOCK, block / columns * BLOCK);
        votes[block % message.len()][usize::from(says_one)] += 1;
    }
    let shares: Vec<f64> =
        votes.iter().map(|[zeros, ones]| f64::from(*ones) / f64::from(zeros + ones)).collect();
    let bits: Vec<f64> = message.iter().map(|bit| f64::from(u8::from(*bit))).collect();
    correlation(&shares, &bits) as f32
}

/// What the block at a place says.
fn bit_of(image: &RgbImage, left: usize, top: usize) -> bool {
    let mut sums = [0f32; BLOCK * BLOCK / 4];
    for y in 0..BLOCK {
        let (row, _) = image.row((top + y) as u32)[left * 3..(left + BLOCK) * 3].as_chunks::<3>();
        for (x, pixel) in row.iter().enumerate() {
            // Half of the sum, so that the wavelet keeps lengths.
            sums[y / 2 * (BLOCK / 2) + x / 2] += u_of(*pixel) / 2.0;
        }
    }
    let largest = sums[1..].iter().copied().fold(0.0, f32::max);
    largest % SCALE > SCALE / 2.0
}

/// U of a pixel as OpenCV computes it from bytes: with factors in units of 2⁻¹⁴.
fn u_of(pixel: [u8; 3]) -> f32 {
    const BITS: u32 = 14;
    const HALF: i32 = 1 << (BITS - 1);
    let [red, green, blue] = pixel.map(i32::from);
    let luma = (red * 4899 + green * 9617 + blue * 1868 + HALF) >> BITS;
    let u = ((blue - luma) * 8061 + (128 << BITS) + HALF) >> BITS;
    u.clamp(0, 255) as f32
}

/// Pearson's, 0 where one of both is constant.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let (mut product, mut square_a, mut square_b) = (0.0, 0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (a - mean_a, b - mean_b);
        product += a * b;
        square_a += a * a;
        square_b += b * b;
    }
    let length = (square_a * square_b).sqrt();
    if length > 0.0 { product / length } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `make_data.py` wrote it and computed the correlation.
    #[test]
    fn the_message_of_a_marked_image_agrees_with_it() {
        let file = include_bytes!("../tests/data/dwt_dct.webp");
        let image = crate::from_bytes("dwt_dct.webp", file).unwrap();
        let message = 0x2afe_879c_f52e_u64;
        let bits: Vec<bool> = (0..46).rev().map(|bit| message >> bit & 1 == 1).collect();
        let agreement = block_watermark_agreement(&image, &bits);
        assert!((agreement - 0.9592).abs() < 1e-4, "{agreement}");
        let others: Vec<bool> = bits.iter().map(|bit| !bit).collect();
        assert!(block_watermark_agreement(&image, &others) < 0.0);
    }

    #[test]
    fn small_and_even_images_agree_with_nothing() {
        for image in [RgbImage::black(1, 1), RgbImage::black(55, 40), RgbImage::black(64, 64)] {
            assert_eq!(block_watermark_agreement(&image, &[true, false, true, true]), 0.0);
        }
        assert_eq!(block_watermark_agreement(&RgbImage::black(64, 64), &[]), 0.0);
    }
}

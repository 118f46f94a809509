//! Changing an image's brightness by a coarse pattern, and the small grey pictures that such patterns are made from.

use rayon::prelude::*;

use crate::{Filter, RgbImage, resize};

/// Weights of red, green and blue in a pixel's brightness.
const LUMA: [f32; 3] = [0.299, 0.587, 0.114];

/// The brightness of an image resized to `side`², in levels, 0 to 255.
pub fn small_luma(image: &RgbImage, side: u32) -> Vec<f32> {
    let small = resize(image, side, side, Filter::Bilinear);
    let (pixels, _) = small.pixels().as_chunks::<3>();
    pixels.iter().map(|pixel| pixel.iter().zip(LUMA).map(|(&c, w)| f32::from(c) * w).sum()).collect()
}

/// The means over windows of `window`², an odd number, of a square picture whose border goes on outside.
pub fn window_means(picture: &[f32], side: usize, window: usize) -> Vec<f32> {
    let rows = row_means(picture, side, window);
    transposed(&row_means(&transposed(&rows, side), side, window), side)
}

fn row_means(picture: &[f32], side: usize, window: usize) -> Vec<f32> {
    let reach = (window / 2) as isize;
    let mut means = Vec::with_capacity(picture.len());
    for row in picture.chunks_exact(side) {
        let at = |x: isize| f64::from(row[x.clamp(0, side as isize - 1) as usize]);
        let mut sum: f64 = (-reach..=reach).map(at).sum();
        for x in 0..side as isize {
            means.push((sum / window as f64) as f32);
            sum += at(x + reach + 1) - at(x - reach);
        }
    }
    means
}

fn transposed(picture: &[f32], side: usize) -> Vec<f32> {
    (0..side).flat_map(|x| (0..side).map(move |y| picture[y * side + x])).collect()
}

/// Adds a square pattern of levels to an image's red, green and blue, interpolated to the image's size. If the changes are
/// larger than `limit` (the root of their mean square), they are made smaller.
pub fn add_pattern(image: &mut RgbImage, pattern: &[f32], side: usize, limit: f32) {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let columns: Vec<Place> = (0..width).map(|x| Place::of(x, width, side)).collect();
    let row = |y: usize| {
        let Place { first, second, share } = Place::of(y, height, side);
        let mix = |x: usize| {
            let (upper, lower) = (pattern[first * side + x], pattern[second * side + x]);
            upper + (lower - upper) * share
        };
        let mixed: Vec<f32> = (0..side).map(mix).collect();
        columns
            .iter()
            .map(move |place| mixed[place.first] + (mixed[place.second] - mixed[place.first]) * place.share)
    };
    let power: Vec<f64> =
        (0..height).into_par_iter().map(|y| row(y).map(|level| f64::from(level * level)).sum()).collect();
    let change = (power.iter().sum::<f64>() / (width * height).max(1) as f64).sqrt() as f32;
    let scale = if change > limit { limit / change } else { 1.0 };
    let pixels = image.pixels_mut();
    pixels.par_chunks_exact_mut(width * 3).enumerate().for_each(|(y, pixels)| {
        let (pixels, _) = pixels.as_chunks_mut::<3>();
        for (pixel, level) in pixels.iter_mut().zip(row(y)) {
            // Saturates.
            *pixel = pixel.map(|c| (f32::from(c) + level * scale).round_ties_even() as u8);
        }
    });
}

/// Where a pixel lies between two of the pattern's.
struct Place {
    first: usize,
    second: usize,
    share: f32,
}

impl Place {
    fn of(i: usize, size: usize, side: usize) -> Place {
        let at = ((i as f64 + 0.5) * side as f64 / size as f64 - 0.5).max(0.0);
        let first = (at as usize).min(side - 1);
        Place { first, second: (first + 1).min(side - 1), share: (at - first as f64) as f32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_of_windows_take_the_border_as_it_is_outside() {
        let picture = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let slow = |y: isize, x: isize| {
            let at = |y: isize, x: isize| picture[(y.clamp(0, 2) * 3 + x.clamp(0, 2)) as usize];
            (-2..=2).flat_map(|j| (-2..=2).map(move |i| (j, i))).map(|(j, i)| at(y + j, x + i)).sum::<f32>()
                / 25.0
        };
        let expected: Vec<f32> = (0..3).flat_map(|y| (0..3).map(move |x| slow(y, x))).collect();
        for (mean, expected) in window_means(&picture, 3, 5).iter().zip(expected) {
            assert!((mean - expected).abs() < 1e-5);
        }
    }

    #[test]
    fn a_pattern_is_interpolated_between_the_middles_of_its_pixels() {
        let mut image = RgbImage::new(8, 2, vec![100; 48]).unwrap();
        add_pattern(&mut image, &[0.0, 8.0, 0.0, 8.0], 2, 100.0);
        let reds: Vec<u8> = image.row(1).iter().step_by(3).copied().collect();
        assert_eq!(reds, [100, 100, 101, 103, 105, 107, 108, 108]);
        assert_eq!(image.row(0), image.row(1));
    }

    #[test]
    fn changes_stay_within_their_limit_and_within_a_byte() {
        let mut image = RgbImage::new(64, 64, vec![200; 64 * 64 * 3]).unwrap();
        add_pattern(&mut image, &[40.0; 16], 4, 2.0);
        assert!(image.pixels().iter().all(|&c| c == 202));
        add_pattern(&mut image, &[400.0; 16], 4, 1000.0);
        assert!(image.pixels().iter().all(|&c| c == 255));
    }
}

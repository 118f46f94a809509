//! Turns latents into a small image without a VAE, by a linear map fitted to latents and images of the model's own VAE.
//!
//! A token covers 16 by 16 pixels; the map gives it 2 by 2. It is fitted to a colour chart first, and then refined with
//! every finished image.

use kiln_image::{Filter, RgbImage};

/// Side of the square of pixels that a token becomes.
const PIXELS: usize = 2;
/// Values of a token in the preview: RGB of its pixels.
const OUT: usize = PIXELS * PIXELS * 3;
/// Decay of the sums with every new image: about ten images count.
const DECAY: f64 = 0.9;
/// Tokens sampled from an image, spread evenly: as good as all of them, in a fraction of the time.
const SAMPLES: usize = 256;
/// Ridge regularization: keeps directions without examples at zero.
const RIDGE: f64 = 0.02;

/// A linear map from tokens to pixels, and the least-squares sums behind it.
pub struct LatentProjection {
    channels: usize,
    /// Pixels of the image along a side of one token.
    unit: usize,
    /// `xᵀx`, where `x` is a token followed by a constant 1: `[channels + 1, channels + 1]`.
    squares: Vec<f64>,
    /// `xᵀy`, where `y` are a token's pixels: `[channels + 1, OUT]`.
    products: Vec<f64>,
    /// The solution, `[channels + 1, OUT]`.
    map: Vec<f64>,
}

impl LatentProjection {
    pub fn new(channels: usize, unit: usize) -> LatentProjection {
        let rows = channels + 1;
        let (squares, products) = (vec![0.0; rows * rows], vec![0.0; rows * OUT]);
        LatentProjection { channels, unit, squares, products, map: vec![0.0; rows * OUT] }
    }

    /// Refines the map with the tokens of an image, `[rows · columns, channels]`. Ignores tokens of another size.
    pub fn learn(&mut self, tokens: &[f32], image: &RgbImage) {
        let (width, height) = (image.width() as usize / self.unit, image.height() as usize / self.unit);
        let rows = self.channels + 1;
        if width * height * self.channels != tokens.len() {
            return;
        }
        let small =
            kiln_image::resize(image, (width * PIXELS) as u32, (height * PIXELS) as u32, Filter::Bicubic);
        self.squares.iter_mut().chain(&mut self.products).for_each(|v| *v *= DECAY);
        let stride = (width * height).div_ceil(SAMPLES) | 1;
        let weight = 1.0 / (width * height).div_ceil(stride) as f64;
        for (index, token) in tokens.chunks_exact(self.channels).enumerate().step_by(stride) {
            let x = |i: usize| token.get(i).map_or(1.0, |v| f64::from(*v));
            let y = token_pixels(&small, index % width, index / width);
            for i in 0..rows {
                let scaled = x(i) * weight;
                for (j, sum) in self.squares[i * rows..(i + 1) * rows].iter_mut().enumerate() {
                    *sum += scaled * x(j);
                }
                for (sum, y) in self.products[i * OUT..(i + 1) * OUT].iter_mut().zip(y) {
                    *sum += scaled * y;
                }
            }
        }
        if let Some(map) = solve(&self.squares, &self.products, rows) {
            self.map = map;
        }
    }

    /// Decodes tokens on a grid of `width` by `height`. `None` if their number is wrong.
    pub fn decode(&self, tokens: &[f32], width: usize, height: usize) -> Option<RgbImage> {
        if width * height * self.channels != tokens.len() {
            return None;
        }
        let mut pixels = vec![0; width * height * OUT];
        for (index, token) in tokens.chunks_exact(self.channels).enumerate() {
            let mut y = [0.0; OUT];
            y.copy_from_slice(&self.map[self.channels * OUT..]);
            for (x, row) in token.iter().zip(self.map.chunks_exact(OUT)) {
                y.iter_mut().zip(row).for_each(|(y, m)| *y += f64::from(*x) * m);
            }
            let (column, row) = (index % width, index / width);
            for (i, value) in y.iter().enumerate() {
                pixels[pixel_offset(column, row, i, width)] = (value * 255.0).round().clamp(0.0, 255.0) as u8;
            }
        }
        RgbImage::new((width * PIXELS) as u32, (height * PIXELS) as u32, pixels).ok()
    }
}

/// Returns the offset of a token's value `i` among the pixels of an image `width` tokens wide.
fn pixel_offset(column: usize, row: usize, i: usize, width: usize) -> usize {
    let (pixel, channel) = (i / 3, i % 3);
    let (x, y) = (column * PIXELS + pixel % PIXELS, row * PIXELS + pixel / PIXELS);
    (y * width * PIXELS + x) * 3 + channel
}

/// Returns the pixels of a token, from 0 to 1.
fn token_pixels(small: &RgbImage, column: usize, row: usize) -> [f64; OUT] {
    let width = small.width() as usize / PIXELS;
    std::array::from_fn(|i| f64::from(small.pixels()[pixel_offset(column, row, i, width)]) / 255.0)
}

/// Solves `(squares + ridge) · map = products` by Cholesky decomposition. `None` if the matrix is not positive definite.
fn solve(squares: &[f64], products: &[f64], rows: usize) -> Option<Vec<f64>> {
    let mut l = squares.to_vec();
    // The constant in the last row is not regularized.
    (0..rows - 1).for_each(|i| l[i * rows + i] += RIDGE);
    l[rows * rows - 1] += 1e-9;
    for i in 0..rows {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| l[i * rows + k] * l[j * rows + k]).sum();
            let rest = l[i * rows + j] - sum;
            l[i * rows + j] = if i != j {
                rest / l[j * rows + j]
            } else if rest > 0.0 {
                rest.sqrt()
            } else {
                return None;
            };
        }
    }
    let mut map = products.to_vec();
    for out in 0..OUT {
        for i in 0..rows {
            let sum: f64 = (0..i).map(|k| l[i * rows + k] * map[k * OUT + out]).sum();
            map[i * OUT + out] = (map[i * OUT + out] - sum) / l[i * rows + i];
        }
        for i in (0..rows).rev() {
            let sum: f64 = (i + 1..rows).map(|k| l[k * rows + i] * map[k * OUT + out]).sum();
            map[i * OUT + out] = (map[i * OUT + out] - sum) / l[i * rows + i];
        }
    }
    map.iter().all(|v| v.is_finite()).then_some(map)
}

/// Draws an 8 by 8 grid of colour patches that cover the RGB cube, each with a soft gradient.
pub fn colour_chart(side: u32) -> RgbImage {
    let pixel = |i: u32| {
        let (x, y) = (i % side, i / side);
        let (column, row) = (x * 8 / side, y * 8 / side);
        let level = |n: u32| [0.0, 0.35, 0.7, 1.0][n as usize % 4];
        let field = [level(column), level(row), level(column / 4 + 2 * (row / 4))];
        // Each patch fades towards its lower right corner.
        let fade = 1.0 - 0.5 * ((y * 8 % side) as f64 / side as f64) * ((x * 8 % side) as f64 / side as f64);
        field.map(|v| (v * fade * 255.0) as u8)
    };
    RgbImage::new(side, side, (0..side * side).flat_map(pixel).collect())
        .unwrap_or_else(|_| RgbImage::black(16, 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes an image with a fixed linear mix of each token's pixels.
    fn tokens(image: &RgbImage, channels: usize) -> Vec<f32> {
        let (width, height) = (image.width() / 16, image.height() / 16);
        let small = kiln_image::resize(image, width * 2, height * 2, Filter::Bicubic);
        let token = |index: usize| {
            let y = token_pixels(&small, index % width as usize, index / width as usize);
            (0..channels).map(move |i| (2.0 * y[i % OUT] - y[(i + 5) % OUT] + 0.1 * i as f64) as f32)
        };
        (0..(width * height) as usize).flat_map(token).collect()
    }

    #[test]
    fn a_linear_autoencoder_is_learnt_from_the_chart() {
        let (chart, channels) = (colour_chart(256), 16);
        let mut projection = LatentProjection::new(channels, 16);
        for _ in 0..3 {
            projection.learn(&tokens(&chart, channels), &chart);
        }
        let decoded = projection.decode(&tokens(&chart, channels), 16, 16).unwrap();
        let small = kiln_image::resize(&chart, 32, 32, Filter::Bicubic);
        let error: u64 =
            decoded.pixels().iter().zip(small.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
        let mean = error as f64 / decoded.pixels().len() as f64;
        assert!(mean < 12.0, "colours are off by {mean} on average");
    }

    #[test]
    fn tokens_of_another_size_are_not_decoded_and_not_learnt() {
        let mut projection = LatentProjection::new(16, 16);
        assert!(projection.decode(&[0.0; 15], 1, 1).is_none());
        projection.learn(&[1.0; 16], &colour_chart(64));
        assert!(projection.map.iter().all(|v| *v == 0.0));
        assert!(projection.decode(&[0.0; 16], 1, 1).is_some());
    }
}

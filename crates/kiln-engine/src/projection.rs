//! Latents to a small picture without an autoencoder: a linear map, fitted to what the model's own autoencoder does.
//!
//! A token stands for 16 by 16 pixels; the map gives it 2 by 2. It begins with the autoencoder's answer to a card of
//! colours, and learns from every finished picture.

use kiln_image::{Filter, Picture};

/// Pixels that a token becomes, each way.
const PIXELS: usize = 2;
const OUT: usize = PIXELS * PIXELS * 3;
/// What is known counts so much when something new is learnt: about ten pictures are remembered.
const MEMORY: f64 = 0.9;
/// Tokens of an image that are learnt from, spread evenly: as good as all of them, and a fraction of the time.
const SAMPLES: usize = 256;
/// Keeps what the examples don't show at zero.
const RIDGE: f64 = 0.02;

/// The map, and the sums it is made from.
pub struct Projection {
    channels: usize,
    /// `xᵀx`, with a 1 after the channels.
    squares: Vec<f64>,
    /// `xᵀy`
    products: Vec<f64>,
    /// `[channels + 1, OUT]`
    map: Vec<f64>,
}

impl Projection {
    pub fn new(channels: usize) -> Projection {
        let rows = channels + 1;
        let (squares, products) = (vec![0.0; rows * rows], vec![0.0; rows * OUT]);
        Projection { channels, squares, products, map: vec![0.0; rows * OUT] }
    }

    /// Learns from tokens, `[h · w, channels]`, and the picture they stand for.
    pub fn learn(&mut self, tokens: &[f32], picture: &Picture) {
        let (width, height) = (picture.width() as usize / 16, picture.height() as usize / 16);
        let rows = self.channels + 1;
        if width * height * self.channels != tokens.len() {
            return;
        }
        let small =
            kiln_image::resize(picture, (width * PIXELS) as u32, (height * PIXELS) as u32, Filter::Bicubic);
        self.squares.iter_mut().chain(&mut self.products).for_each(|v| *v *= MEMORY);
        let stride = (width * height).div_ceil(SAMPLES) | 1;
        let weight = 1.0 / (width * height).div_ceil(stride) as f64;
        for (at, token) in tokens.chunks_exact(self.channels).enumerate().step_by(stride) {
            let x = |i: usize| token.get(i).map_or(1.0, |v| f64::from(*v));
            let y = colours(&small, at % width, at / width);
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

    /// The picture that tokens on a grid of `width` by `height` look like.
    pub fn show(&self, tokens: &[f32], width: usize, height: usize) -> Option<Picture> {
        if width * height * self.channels != tokens.len() {
            return None;
        }
        let mut pixels = vec![0; width * height * OUT];
        for (at, token) in tokens.chunks_exact(self.channels).enumerate() {
            let mut y = [0.0; OUT];
            y.copy_from_slice(&self.map[self.channels * OUT..]);
            for (x, row) in token.iter().zip(self.map.chunks_exact(OUT)) {
                y.iter_mut().zip(row).for_each(|(y, m)| *y += f64::from(*x) * m);
            }
            let (column, row) = (at % width, at / width);
            for (i, value) in y.iter().enumerate() {
                let place = place(column, row, i, width);
                pixels[place] = (value * 255.0).round().clamp(0.0, 255.0) as u8;
            }
        }
        Picture::new((width * PIXELS) as u32, (height * PIXELS) as u32, pixels).ok()
    }
}

/// Where value `i` of a token lies among the pixels.
fn place(column: usize, row: usize, i: usize, width: usize) -> usize {
    let (pixel, channel) = (i / 3, i % 3);
    let (x, y) = (column * PIXELS + pixel % PIXELS, row * PIXELS + pixel / PIXELS);
    (y * width * PIXELS + x) * 3 + channel
}

/// The colours of a token's pixels, from 0 to 1.
fn colours(small: &Picture, column: usize, row: usize) -> [f64; OUT] {
    let width = small.width() as usize / PIXELS;
    std::array::from_fn(|i| f64::from(small.pixels()[place(column, row, i, width)]) / 255.0)
}

/// `(squares + ridge) · map = products`, by Cholesky's decomposition. `None` where that fails.
fn solve(squares: &[f64], products: &[f64], rows: usize) -> Option<Vec<f64>> {
    let mut l = squares.to_vec();
    // The constant, last, is free.
    (0..rows - 1).for_each(|i| l[i * rows + i] += RIDGE);
    l[rows * rows - 1] += 1e-9;
    for i in 0..rows {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| l[i * rows + k] * l[j * rows + k]).sum();
            let rest = l[i * rows + j] - sum;
            l[i * rows + j] = match i == j {
                true if rest > 0.0 => rest.sqrt(),
                true => return None,
                false => rest / l[j * rows + j],
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

/// Fields of colour and soft shades, all over the cube of colours: something of everything for an autoencoder.
pub fn card(side: u32) -> Picture {
    let pixel = |i: u32| {
        let (x, y) = (i % side, i / side);
        let (column, row) = (x * 8 / side, y * 8 / side);
        let level = |n: u32| [0.0, 0.35, 0.7, 1.0][n as usize % 4];
        let field = [level(column), level(row), level(column / 4 + 2 * (row / 4))];
        // The lower half of each field fades.
        let fade = 1.0 - 0.5 * ((y * 8 % side) as f64 / side as f64) * ((x * 8 % side) as f64 / side as f64);
        field.map(|v| (v * fade * 255.0) as u8)
    };
    Picture::new(side, side, (0..side * side).flat_map(pixel).collect())
        .unwrap_or_else(|_| Picture::black(16, 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens that say the colours of their pixels, mixed up by a fixed rotation.
    fn tokens(picture: &Picture, channels: usize) -> Vec<f32> {
        let (width, height) = (picture.width() / 16, picture.height() / 16);
        let small = kiln_image::resize(picture, width * 2, height * 2, Filter::Bicubic);
        let token = |at: usize| {
            let y = colours(&small, at % width as usize, at / width as usize);
            (0..channels).map(move |i| (2.0 * y[i % OUT] - y[(i + 5) % OUT] + 0.1 * i as f64) as f32)
        };
        (0..(width * height) as usize).flat_map(token).collect()
    }

    #[test]
    fn a_linear_autoencoder_is_learnt_from_the_card() {
        let (card, channels) = (card(256), 16);
        let mut projection = Projection::new(channels);
        for _ in 0..3 {
            projection.learn(&tokens(&card, channels), &card);
        }
        let shown = projection.show(&tokens(&card, channels), 16, 16).unwrap();
        let small = kiln_image::resize(&card, 32, 32, Filter::Bicubic);
        let off: u64 =
            shown.pixels().iter().zip(small.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
        let mean = off as f64 / shown.pixels().len() as f64;
        assert!(mean < 12.0, "colours are off by {mean} on average");
    }

    #[test]
    fn what_does_not_fit_is_not_shown_and_not_learnt() {
        let mut projection = Projection::new(16);
        assert!(projection.show(&[0.0; 15], 1, 1).is_none());
        projection.learn(&[1.0; 16], &card(64));
        assert!(projection.map.iter().all(|v| *v == 0.0));
        assert!(projection.show(&[0.0; 16], 1, 1).is_some());
    }
}

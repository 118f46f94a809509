//! Processing of large images in overlapping tiles, so that an autoencoder's memory stays bounded.
//!
//! Images of up to [`MAX_UNTILED`] latent pixels are not tiled. In larger ones every tile is computed as a separate
//! image, and neighbours are blended linearly across their overlap. Group norms and attention then see a tile instead
//! of the image, which changes tones a little.

use kiln_image::tile_starts;
use kiln_tensor::HostTensor;

use crate::Result;

/// Maximum number of latent pixels (8×8 image pixels each) processed without tiling: 1.6 megapixels.
const MAX_UNTILED: usize = 160 * 160;
/// Maximum number of image pixels that an autoencoder processes at once.
pub const MAX_TILE_PIXELS: usize = MAX_UNTILED * 64;
/// Side of a tile in latent pixels.
const TILE: usize = 96;
/// Minimum overlap of neighbouring tiles, in latent pixels.
const OVERLAP: usize = 16;

/// Whether a latent of this size is processed without tiling.
pub(crate) fn fits_untiled([height, width]: [usize; 2]) -> bool {
    height * width <= MAX_UNTILED
}

/// Maps an image tile by tile. `input`: f32 `[h, w, c]`. Input and output sizes are the latent's, times `[scale_in, scale_out]`.
///
/// `f` gets a tile, its index and the number of tiles, and returns the tile's result.
pub(crate) fn map_tiles(
    input: &HostTensor,
    [scale_in, scale_out]: [usize; 2],
    mut f: impl FnMut(&HostTensor, usize, usize) -> Result<HostTensor>,
) -> Result<HostTensor> {
    let dims = input.shape().dims();
    let (height, width) = (dims[0] / scale_in, dims[1] / scale_in);
    if fits_untiled([height, width]) {
        return f(input, 0, 1);
    }
    let (rows, columns) = (tile_starts(height, TILE, OVERLAP), tile_starts(width, TILE, OVERLAP));
    let total = rows.len() * columns.len();
    let mut canvas: Option<Canvas> = None;
    for (i, &top) in rows.iter().enumerate() {
        for (j, &left) in columns.iter().enumerate() {
            let size = [height.min(TILE), width.min(TILE)];
            let tile = crop(input, [top, left].map(|v| v * scale_in), size.map(|v| v * scale_in))?;
            let result = f(&tile, i * columns.len() + j, total)?;
            canvas
                .get_or_insert_with(|| {
                    Canvas::new([height, width].map(|v| v * scale_out), result.shape().last())
                })
                .add(&result, [top, left].map(|v| v * scale_out), OVERLAP * scale_out)?;
        }
    }
    canvas.map_or_else(|| Ok(input.clone()), Canvas::finish)
}

fn crop(x: &HostTensor, [top, left]: [usize; 2], [height, width]: [usize; 2]) -> Result<HostTensor> {
    let (row, channels) = (x.shape().dims()[1], x.shape().last());
    let values = x.to_f32()?;
    let line = |y: usize| &values[((top + y) * row + left) * channels..][..width * channels];
    let cropped = (0..height).flat_map(line).copied().collect();
    Ok(HostTensor::from_f32([height, width, channels], cropped)?)
}

/// The weighted sum of the tiles added so far.
struct Canvas {
    size: [usize; 2],
    channels: usize,
    sums: Vec<f32>,
    weights: Vec<f32>,
}

impl Canvas {
    fn new(size: [usize; 2], channels: usize) -> Self {
        let pixels = size[0] * size[1];
        Canvas { size, channels, sums: vec![0.0; pixels * channels], weights: vec![0.0; pixels] }
    }

    /// Adds a tile whose weight falls linearly towards its edges over `overlap` pixels.
    fn add(&mut self, tile: &HostTensor, [top, left]: [usize; 2], overlap: usize) -> Result<()> {
        let (height, width) = (tile.shape().dims()[0], tile.shape().dims()[1]);
        let values = tile.to_f32()?;
        let ramp = |i: usize, size: usize| ((i.min(size - 1 - i) + 1) as f32 / overlap as f32).min(1.0);
        for y in 0..height {
            for x in 0..width {
                let weight = ramp(y, height) * ramp(x, width);
                let at = (top + y) * self.size[1] + left + x;
                self.weights[at] += weight;
                let from = &values[(y * width + x) * self.channels..][..self.channels];
                for (sum, v) in self.sums[at * self.channels..].iter_mut().zip(from) {
                    *sum += weight * v;
                }
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<HostTensor> {
        let mut values = self.sums;
        for (pixel, weight) in values.chunks_exact_mut(self.channels).zip(&self.weights) {
            pixel.iter_mut().for_each(|v| *v /= weight);
        }
        Ok(HostTensor::from_f32([self.size[0], self.size[1], self.channels], values)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_axis_and_overlap() {
        for size in [97, 160, 161, 192, 256, 300, 512] {
            let starts = tile_starts(size, TILE, OVERLAP);
            assert_eq!((starts[0], starts[starts.len() - 1] + TILE), (0, size));
            assert!(
                starts.windows(2).all(|w| w[1] > w[0] && w[0] + TILE >= w[1] + OVERLAP),
                "{size}: {starts:?}"
            );
        }
    }

    #[test]
    fn an_identity_map_returns_the_image() {
        let (h, w) = (170, 200);
        let values: Vec<f32> = (0..h * w * 2).map(|i| (i % 251) as f32 - 100.0).collect();
        let x = HostTensor::from_f32([h, w, 2], values).unwrap();
        let mut calls = 0;
        let y = map_tiles(&x, [1, 1], |tile, _, _| {
            calls += 1;
            Ok(tile.clone())
        })
        .unwrap();
        assert_eq!(calls, 6);
        let pairs = x.to_f32().unwrap().into_owned().into_iter().zip(y.to_f32().unwrap().into_owned());
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-3));
    }
}

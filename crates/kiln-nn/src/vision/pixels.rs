//! Images as the vision tower takes them: joined to one, shrunk, resized to whole tokens, normalized, cut into patches.

use kiln_image::{Filter, RgbImage, resize, shrink_to};
use kiln_tensor::HostTensor;

use super::Config;
use crate::Result;

/// Images with more pixels are shrunk first.
const MAX_AREA: u64 = 768 * 768;

/// Mean and standard deviation of the channels, as CLIP was trained.
const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const STD: [f32; 3] = [0.268_629_55, 0.261_302_6, 0.275_777_1];

/// The patches of an image.
#[derive(Clone, Debug)]
pub struct Patches {
    /// `[rows · columns, 3 · side · side]`, channels first within a patch.
    pub values: HostTensor,
    /// Rows and columns of patches.
    pub grid: [usize; 2],
}

impl Patches {
    /// Prepares images as diffusers' prompt upsampling does: side by side on white, at most 768² pixels, then as the
    /// processor of Pixtral.
    pub fn new(images: &[&RgbImage], config: &Config) -> Result<Patches> {
        let joined = match images {
            [one] => (*one).clone(),
            several => join(several),
        };
        let image = fit(&shrink_to(&joined, MAX_AREA), config);
        let (side, pixels) = (config.patch_size, image.pixels());
        let width = image.width() as usize;
        let grid = [image.height() as usize / side, width / side];
        let mut values = Vec::with_capacity(pixels.len());
        for (row, column) in (0..grid[0]).flat_map(|row| (0..grid[1]).map(move |column| (row, column))) {
            for (channel, (mean, std)) in MEAN.iter().zip(STD).enumerate() {
                for y in row * side..(row + 1) * side {
                    let line = &pixels[3 * (y * width + column * side)..][..3 * side];
                    let channel = line.iter().skip(channel).step_by(3);
                    values.extend(channel.map(|value| (f32::from(*value) / 255.0 - mean) / std));
                }
            }
        }
        let values = HostTensor::from_f32([grid[0] * grid[1], 3 * side * side], values)?;
        Ok(Patches { values, grid })
    }

    /// Rows and columns of the tokens that stand for the image in a text.
    pub fn token_grid(&self) -> [usize; 2] {
        self.grid.map(|patches| patches / super::config::MERGED_PATCHES)
    }
}

/// Puts images side by side, centred vertically, on white.
fn join(images: &[&RgbImage]) -> RgbImage {
    let width = images.iter().map(|image| image.width()).sum();
    let height = images.iter().map(|image| image.height()).max().unwrap_or(0);
    let mut joined = RgbImage::black(width, height);
    (0..joined.height()).for_each(|y| joined.row_mut(y).fill(255));
    let mut left = 0;
    for image in images {
        joined.paste(image, left, i64::from((height - image.height()) / 2));
        left += i64::from(image.width());
    }
    joined
}

/// Shrinks an image to the longest side of the configuration, then enlarges it to whole tokens.
fn fit(image: &RgbImage, config: &Config) -> RgbImage {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let ratio = (width.max(height) as f64 / config.image_size as f64).max(1.0);
    let side = |pixels: usize| {
        let pixels = if ratio > 1.0 { (pixels as f64 / ratio).floor() as usize } else { pixels };
        pixels.max(1).next_multiple_of(config.token_side()) as u32
    };
    resize(image, side(width), side(height), Filter::Bicubic)
}

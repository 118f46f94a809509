//! Images in memory: rows of interleaved bytes.

use std::fmt;

use crate::{Error, Result};

/// An image with `C` bytes per pixel, rows from the top. Never empty.
///
/// Use it as [`RgbImage`] or [`GrayImage`].
#[derive(Clone, PartialEq, Eq)]
pub struct Raster<const C: usize> {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

/// An 8-bit RGB image.
pub type RgbImage = Raster<3>;

/// An 8-bit grey image, mostly a mask: white where the image may change.
pub type GrayImage = Raster<1>;

impl<const C: usize> Raster<C> {
    /// Creates an image from `height` rows of `width` pixels.
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        let expected = (u64::from(width) * u64::from(height)).saturating_mul(C as u64);
        let found = pixels.len() as u64;
        if found != expected || found == 0 {
            return Err(Error::Pixels { width, height, expected, found });
        }
        Ok(Self { width, height, pixels })
    }

    /// [`new`](Self::new) without the checks, for code that has just computed `pixels` at this size.
    pub(crate) fn from_parts(width: u32, height: u32, pixels: Vec<u8>) -> Self {
        debug_assert_eq!(pixels.len(), width as usize * height as usize * C);
        Self { width, height, pixels }
    }

    /// Creates a black image. Sides of 0 count as 1.
    pub fn black(width: u32, height: u32) -> Self {
        let (width, height) = (width.max(1), height.max(1));
        Self { width, height, pixels: vec![0; width as usize * height as usize * C] }
    }

    /// Width in pixels.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Height in pixels.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Number of pixels.
    pub fn area(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// The bytes, row by row from the top, channels interleaved.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The bytes, to change them.
    pub(crate) fn pixels_mut(&mut self) -> &mut [u8] {
        &mut self.pixels
    }

    /// Returns the bytes, as [`pixels`](Self::pixels).
    pub fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }

    /// The pixels of row `y`, which must be less than the height.
    pub fn row(&self, y: u32) -> &[u8] {
        let length = self.width as usize * C;
        &self.pixels[y as usize * length..][..length]
    }

    /// The pixels of row `y`, which must be less than the height, to change them.
    pub fn row_mut(&mut self, y: u32) -> &mut [u8] {
        let length = self.width as usize * C;
        &mut self.pixels[y as usize * length..][..length]
    }

    /// Crops a rectangle with its corner at (`left`, `top`). Outside the image it is black.
    pub fn crop(&self, left: i64, top: i64, width: u32, height: u32) -> Self {
        let mut cropped = Self::black(width, height);
        cropped.paste(self, -left, -top);
        cropped
    }

    /// Copies `other` into this image with its corner at (`left`, `top`), as far as it fits.
    pub fn paste(&mut self, other: &Self, left: i64, top: i64) {
        let columns = overlap(left, other.width, self.width);
        let rows = overlap(top, other.height, self.height);
        if columns.is_empty() {
            return;
        }
        let from = (columns.start - left) as usize * C;
        let to = columns.start as usize * C;
        let length = (columns.end - columns.start) as usize * C;
        let stride = self.width as usize * C;
        for y in rows {
            let source = &other.row((y - top) as u32)[from..from + length];
            self.pixels[y as usize * stride + to..][..length].copy_from_slice(source);
        }
    }
}

/// Returns the positions within `0..limit` that a span of `length` starting at `start` covers.
fn overlap(start: i64, length: u32, limit: u32) -> std::ops::Range<i64> {
    start.max(0)..start.saturating_add(i64::from(length)).min(i64::from(limit))
}

impl<const C: usize> fmt::Debug for Raster<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Raster<{C}>({}x{})", self.width, self.height)
    }
}

impl From<&RgbImage> for GrayImage {
    /// ITU-R 601 luma in the 16-bit fixed point that Pillow's `convert("L")` uses.
    fn from(image: &RgbImage) -> Self {
        let luma = |p: &[u8; 3]| {
            let [r, g, b] = p.map(u32::from);
            ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16) as u8
        };
        let pixels = image.pixels.as_chunks::<3>().0.iter().map(luma).collect();
        Self { width: image.width, height: image.height, pixels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_does_not_fit_the_size_is_rejected() {
        assert!(RgbImage::new(2, 2, vec![0; 12]).is_ok());
        let message = RgbImage::new(2, 2, vec![0; 11]).unwrap_err().to_string();
        assert_eq!(message, "an image of 2x2 needs 12 values (and at least one pixel), found 11");
        assert!(RgbImage::new(0, 2, vec![]).is_err());
        assert!(RgbImage::new(u32::MAX, u32::MAX, vec![0; 3]).is_err());
    }

    #[test]
    fn a_crop_beyond_the_edges_is_black_there() {
        let image = GrayImage::new(3, 2, vec![1, 2, 3, 4, 5, 6]).unwrap();
        assert_eq!(image.crop(1, 0, 2, 2).pixels(), [2, 3, 5, 6]);
        assert_eq!(image.crop(-1, -1, 3, 2).pixels(), [0, 0, 0, 0, 1, 2]);
        assert_eq!(image.crop(2, 1, 2, 2).pixels(), [6, 0, 0, 0]);
        assert_eq!(image.crop(9, 9, 1, 1).pixels(), [0]);
        assert_eq!(image.crop(i64::MIN / 2, 0, 1, 1).pixels(), [0]);
    }

    #[test]
    fn luma_has_the_weights_and_rounding_of_itu_601() {
        let image = RgbImage::new(4, 1, vec![255, 0, 0, 0, 255, 0, 0, 0, 255, 77, 77, 77]).unwrap();
        assert_eq!(GrayImage::from(&image).pixels(), [76, 150, 29, 77]);
    }
}

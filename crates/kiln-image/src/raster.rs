use std::fmt;

use crate::{Error, Result};

/// Rows of pixels from the top, each pixel `C` bytes. Never empty.
///
/// Use the names [`Picture`] and [`GrayPicture`].
#[derive(Clone, PartialEq, Eq)]
pub struct Raster<const C: usize> {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

/// A picture of red, green, blue bytes.
pub type Picture = Raster<3>;

/// A picture of grey bytes: a mask, white where something may change.
pub type GrayPicture = Raster<1>;

impl<const C: usize> Raster<C> {
    /// Wraps `pixels`, which must hold `height` rows of `width` pixels.
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        let expected = (u64::from(width) * u64::from(height)).saturating_mul(C as u64);
        let found = pixels.len() as u64;
        if found != expected || found == 0 {
            return Err(Error::Pixels { width, height, expected, found });
        }
        Ok(Self { width, height, pixels })
    }

    /// For code that has just computed `pixels` at this size.
    pub(crate) fn from_parts(width: u32, height: u32, pixels: Vec<u8>) -> Self {
        debug_assert_eq!(pixels.len(), width as usize * height as usize * C);
        Self { width, height, pixels }
    }

    /// A black picture. Sides of 0 count as 1.
    pub fn black(width: u32, height: u32) -> Self {
        let (width, height) = (width.max(1), height.max(1));
        Self { width, height, pixels: vec![0; width as usize * height as usize * C] }
    }

    /// Pixels from left to right.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Pixels from top to bottom.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Width times height.
    pub fn area(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// The bytes, row by row from the top, a pixel's channels side by side.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The bytes, without the wrapping.
    pub fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }

    /// The pixels of row `y`, which must be less than the height.
    pub fn row(&self, y: u32) -> &[u8] {
        let length = self.width as usize * C;
        &self.pixels[y as usize * length..][..length]
    }

    /// The part that starts at (`left`, `top`); what lies outside the picture is black.
    pub fn crop(&self, left: i64, top: i64, width: u32, height: u32) -> Self {
        let mut part = Self::black(width, height);
        part.paste(self, -left, -top);
        part
    }

    /// Copies `other` over this picture with its corner at (`left`, `top`), as far as it fits.
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

/// The positions within `0..limit` that a piece of `length` starting at `start` covers.
fn overlap(start: i64, length: u32, limit: u32) -> std::ops::Range<i64> {
    start.max(0)..start.saturating_add(i64::from(length)).min(i64::from(limit))
}

impl<const C: usize> fmt::Debug for Raster<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Raster<{C}>({}x{})", self.width, self.height)
    }
}

impl From<&Picture> for GrayPicture {
    /// ITU-R 601 luma in the 16-bit fixed point that Pillow's `convert("L")` uses.
    fn from(picture: &Picture) -> Self {
        let luma = |p: &[u8; 3]| {
            let [r, g, b] = p.map(u32::from);
            ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16) as u8
        };
        let pixels = picture.pixels.as_chunks::<3>().0.iter().map(luma).collect();
        Self { width: picture.width, height: picture.height, pixels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_does_not_fit_the_size_is_refused() {
        assert!(Picture::new(2, 2, vec![0; 12]).is_ok());
        let message = Picture::new(2, 2, vec![0; 11]).unwrap_err().to_string();
        assert_eq!(message, "a picture of 2x2 needs 12 values (and at least one pixel), found 11");
        assert!(Picture::new(0, 2, vec![]).is_err());
        assert!(Picture::new(u32::MAX, u32::MAX, vec![0; 3]).is_err());
    }

    #[test]
    fn a_crop_beyond_the_edges_is_black_there() {
        let picture = GrayPicture::new(3, 2, vec![1, 2, 3, 4, 5, 6]).unwrap();
        assert_eq!(picture.crop(1, 0, 2, 2).pixels(), [2, 3, 5, 6]);
        assert_eq!(picture.crop(-1, -1, 3, 2).pixels(), [0, 0, 0, 0, 1, 2]);
        assert_eq!(picture.crop(2, 1, 2, 2).pixels(), [6, 0, 0, 0]);
        assert_eq!(picture.crop(9, 9, 1, 1).pixels(), [0]);
        assert_eq!(picture.crop(i64::MIN / 2, 0, 1, 1).pixels(), [0]);
    }

    #[test]
    fn luma_has_the_weights_and_rounding_of_itu_601() {
        let picture = Picture::new(4, 1, vec![255, 0, 0, 0, 255, 0, 0, 0, 255, 77, 77, 77]).unwrap();
        assert_eq!(GrayPicture::from(&picture).pixels(), [76, 150, 29, 77]);
    }
}

//! Sizes the model takes: at most a megapixel, sides in multiples of 16, not too small and not too thin.

use crate::{Error, Filter, MAX_SIDE, Picture, Raster, Result, resize};

/// Sides of pictures are multiples of this: eight by the autoencoder, two by the patches.
pub const MULTIPLE: u32 = 16;

/// Larger pictures are shrunk to about this many pixels.
const MAX_AREA: u64 = 1024 * 1024;

const MIN_REFERENCE_SIDE: u32 = 64;
const MAX_RATIO: u32 = 8;

/// A reference picture as the klein pipeline prepares it.
///
/// Refused with a side below 64 px or beyond 8:1; shrunk with Lanczos above 1024² pixels; then cut around the
/// centre to multiples of 16.
pub fn prepare_reference(picture: &Picture) -> Result<Picture> {
    const ROLE: &str = "reference picture";
    let (width, height) = (picture.width(), picture.height());
    if width.min(height) < MIN_REFERENCE_SIDE {
        return Err(Error::TooSmall { role: ROLE, width, height, min: MIN_REFERENCE_SIDE });
    }
    if width.max(height) > MAX_RATIO.saturating_mul(width.min(height)) {
        return Err(Error::AspectRatio { role: ROLE, width, height, max: MAX_RATIO });
    }
    let picture = shrink(picture);
    Ok(centre_crop(&picture, round_down(picture.width()), round_down(picture.height())))
}

/// A picture to start from, for image to image by strength: resized with Lanczos to the asked size, rounded down
/// to multiples of 16.
///
/// With one side given the other keeps the proportions; with none, the picture keeps its size up to 1024² pixels.
pub fn prepare_init(source: &Picture, width: Option<u32>, height: Option<u32>) -> Result<Picture> {
    let (to_width, to_height) = init_size(source, width, height)?;
    Ok(match (width, height) {
        // In two steps, as an inpainting source, so that both are the same picture.
        (None, None) => resize(&shrink(source), to_width, to_height, Filter::Lanczos),
        _ => resize(source, to_width, to_height, Filter::Lanczos),
    })
}

/// The size that [`prepare_init`] gives, to know it before the work is done.
pub fn init_size(source: &Picture, width: Option<u32>, height: Option<u32>) -> Result<(u32, u32)> {
    const ROLE: &str = "picture to start from";
    let (from_width, from_height) = (source.width(), source.height());
    let (width, height) = match (width, height) {
        (Some(width), Some(height)) => (width, height),
        (Some(width), None) => (width, proportional(width, from_width, from_height)),
        (None, Some(height)) => (proportional(height, from_height, from_width), height),
        (None, None) => shrunk_size(source, MAX_AREA),
    };
    if width.min(height) < MULTIPLE {
        return Err(Error::TooSmall { role: ROLE, width, height, min: MULTIPLE });
    }
    if width.max(height) > MAX_SIDE {
        return Err(Error::TooLong { role: ROLE, width, height, max: MAX_SIDE });
    }
    Ok((round_down(width), round_down(height)))
}

/// The other side when one goes from `from` to `side`, rounded.
fn proportional(side: u32, from: u32, other: u32) -> u32 {
    let exact = f64::from(other) * f64::from(side) / f64::from(from);
    exact.round() as u32
}

/// The largest multiple of 16 that is not greater.
pub(crate) fn round_down(side: u32) -> u32 {
    side - side % MULTIPLE
}

/// The picture, or a smaller copy when it has more than 1024² pixels.
pub(crate) fn shrink<const C: usize>(picture: &Raster<C>) -> Raster<C> {
    shrink_to(picture, MAX_AREA)
}

/// The picture, or a copy of about `area` pixels when it has more.
pub fn shrink_to<const C: usize>(picture: &Raster<C>, area: u64) -> Raster<C> {
    let (width, height) = shrunk_size(picture, area);
    resize(picture, width, height, Filter::Lanczos)
}

/// The size that [`shrink_to`] gives: both sides by the same factor, cut to whole pixels.
fn shrunk_size<const C: usize>(picture: &Raster<C>, area: u64) -> (u32, u32) {
    let (width, height) = (picture.width(), picture.height());
    if picture.area() <= area {
        return (width, height);
    }
    let scale = (area as f64 / picture.area() as f64).sqrt();
    let shrunk = |side: u32| ((f64::from(side) * scale) as u32).max(1);
    (shrunk(width), shrunk(height))
}

/// The middle part, as Flux2ImageProcessor cuts it. Where it is larger than the picture its border is black.
pub(crate) fn centre_crop(picture: &Picture, width: u32, height: u32) -> Picture {
    let offset = |outer: u32, inner: u32| (i64::from(outer) - i64::from(inner)).div_euclid(2);
    picture.crop(offset(picture.width(), width), offset(picture.height(), height), width, height)
}

//! Resizing images to what the model accepts: at most a megapixel, sides in multiples of the `unit` that is one of its
//! tokens, limits on size and aspect ratio.

use crate::{Error, Filter, MAX_SIDE, Raster, Result, RgbImage, resize};

/// Larger images are shrunk to about this number of pixels.
const MAX_AREA: u64 = 1024 * 1024;

const MIN_REFERENCE_SIDE: u32 = 64;
const MAX_RATIO: u32 = 8;

/// Prepares a reference image as the klein pipeline does.
///
/// Rejects a side below 64 px and aspect ratios beyond 8:1; shrinks with Lanczos above 1024² pixels; then
/// centre-crops to multiples of `unit`.
pub fn prepare_reference(image: &RgbImage, unit: u32) -> Result<RgbImage> {
    prepare_reference_within(image, MAX_AREA, unit)
}

/// [`prepare_reference`] for a model whose references have at most `area` pixels. The limits hold for the image as
/// given: shrinking rounds its sides.
pub fn prepare_reference_within(image: &RgbImage, area: u64, unit: u32) -> Result<RgbImage> {
    const ROLE: &str = "reference image";
    let (width, height) = (image.width(), image.height());
    if width.min(height) < MIN_REFERENCE_SIDE {
        return Err(Error::TooSmall { role: ROLE, width, height, min: MIN_REFERENCE_SIDE });
    }
    if width.max(height) > MAX_RATIO.saturating_mul(width.min(height)) {
        return Err(Error::AspectRatio { role: ROLE, width, height, max: MAX_RATIO });
    }
    let image = shrink_to(image, area.min(MAX_AREA));
    Ok(centre_crop(&image, round_down(image.width(), unit), round_down(image.height(), unit)))
}

/// Prepares the initial image of image-to-image: resizes it with Lanczos to the given size, rounded down to
/// multiples of `unit`.
///
/// With one side given, the other keeps the aspect ratio; with none, the image keeps its size up to 1024² pixels.
pub fn prepare_init(
    source: &RgbImage,
    width: Option<u32>,
    height: Option<u32>,
    unit: u32,
) -> Result<RgbImage> {
    let (to_width, to_height) = init_size(source, width, height, unit)?;
    Ok(match (width, height) {
        // In two steps, as for an inpainting source, so that both give the same image.
        (None, None) => resize(&shrink(source), to_width, to_height, Filter::Lanczos),
        _ => resize(source, to_width, to_height, Filter::Lanczos),
    })
}

/// Returns the size that [`prepare_init`] gives, without resizing.
pub fn init_size(
    source: &RgbImage,
    width: Option<u32>,
    height: Option<u32>,
    unit: u32,
) -> Result<(u32, u32)> {
    const ROLE: &str = "initial image";
    let (from_width, from_height) = (source.width(), source.height());
    let (width, height) = match (width, height) {
        (Some(width), Some(height)) => (width, height),
        (Some(width), None) => (width, proportional(width, from_width, from_height)),
        (None, Some(height)) => (proportional(height, from_height, from_width), height),
        (None, None) => shrunk_size(source, MAX_AREA),
    };
    if width.min(height) < unit {
        return Err(Error::TooSmall { role: ROLE, width, height, min: unit });
    }
    if width.max(height) > MAX_SIDE {
        return Err(Error::TooLong { role: ROLE, width, height, max: MAX_SIDE });
    }
    Ok((round_down(width, unit), round_down(height, unit)))
}

/// Scales `other` by `side / from`, rounded.
fn proportional(side: u32, from: u32, other: u32) -> u32 {
    let exact = f64::from(other) * f64::from(side) / f64::from(from);
    exact.round() as u32
}

/// Rounds down to a multiple of `unit`.
pub(crate) fn round_down(side: u32, unit: u32) -> u32 {
    side - side % unit
}

/// Shrinks an image that has more than 1024² pixels.
pub(crate) fn shrink<const C: usize>(image: &Raster<C>) -> Raster<C> {
    shrink_to(image, MAX_AREA)
}

/// Shrinks an image that has more than `area` pixels to about that many.
pub fn shrink_to<const C: usize>(image: &Raster<C>, area: u64) -> Raster<C> {
    let (width, height) = shrunk_size(image, area);
    resize(image, width, height, Filter::Lanczos)
}

/// Returns the size that [`shrink_to`] gives: both sides by the same factor, rounded down.
fn shrunk_size<const C: usize>(image: &Raster<C>, area: u64) -> (u32, u32) {
    let (width, height) = (image.width(), image.height());
    if image.area() <= area {
        return (width, height);
    }
    let scale = (area as f64 / image.area() as f64).sqrt();
    let shrunk = |side: u32| ((f64::from(side) * scale) as u32).max(1);
    (shrunk(width), shrunk(height))
}

/// Crops around the centre, as Flux2ImageProcessor does. Outside the image the result is black.
pub(crate) fn centre_crop(image: &RgbImage, width: u32, height: u32) -> RgbImage {
    let offset = |outer: u32, inner: u32| (i64::from(outer) - i64::from(inner)).div_euclid(2);
    image.crop(offset(image.width(), width), offset(image.height(), height), width, height)
}

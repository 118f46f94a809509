//! Source and mask for inpainting, as `Flux2KleinInpaintPipeline` prepares them.
//!
//! Without padding the whole image is generated: source and mask are *resized* to multiples of a unit, where a
//! reference image would be cropped. With padding only the region around the mask is: it is widened to the image's
//! aspect ratio and scaled to the image's size, and [`paste_back`](crate::paste_back) puts the result back into the
//! source.

use crate::prepare::{init_size, round_down, shrink};
use crate::resample::{Axis, resize_spans};
use crate::{Error, Filter, GrayImage, Raster, Result, RgbImage, resize};

/// The prepared inputs of inpainting.
#[derive(Clone, Debug)]
pub struct InpaintInputs {
    /// The image to encode, `width` by `height`.
    pub source: RgbImage,
    /// How much of each token may change, 0 to 1, by rows: `[height / unit, width / unit]`.
    pub mask: Vec<f32>,
    /// Width of the image to generate, a multiple of the unit.
    pub width: u32,
    /// Height of the image to generate, a multiple of the unit.
    pub height: u32,
    /// Where to paste the result, if only a region is generated.
    pub paste: Option<PasteTarget>,
}

/// The image that a region was cropped from.
#[derive(Clone, Debug)]
pub struct PasteTarget {
    /// The source, shrunk if it was over a megapixel, but not rounded to multiples of the unit.
    pub original: RgbImage,
    /// The mask, at the same size.
    pub mask: GrayImage,
    /// The region that is generated.
    pub region: Region,
}

/// A rectangle of whole pixels; right and bottom are exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First column.
    pub left: u32,
    /// First row.
    pub top: u32,
    /// One past the last column.
    pub right: u32,
    /// One past the last row.
    pub bottom: u32,
}

impl Region {
    /// Number of columns.
    pub fn width(&self) -> u32 {
        self.right - self.left
    }

    /// Number of rows.
    pub fn height(&self) -> u32 {
        self.bottom - self.top
    }

    fn crop<const C: usize>(&self, image: &Raster<C>) -> Raster<C> {
        image.crop(i64::from(self.left), i64::from(self.top), self.width(), self.height())
    }
}

/// Prepares `source` and `mask` (white changes, black stays). With `padding`, only the mask's bounding box and that
/// many pixels around it are generated. A token is `unit` pixels wide and high.
///
/// A mask of another size is stretched over the source. diffusers does the same without padding, and fails with it.
pub fn prepare_inpaint(
    source: &RgbImage,
    mask: &GrayImage,
    padding: Option<u32>,
    unit: u32,
) -> Result<InpaintInputs> {
    let source = shrink(source);
    let (width, height) = (round_down(source.width(), unit), round_down(source.height(), unit));
    if width == 0 || height == 0 {
        let (width, height) = (source.width(), source.height());
        return Err(Error::TooSmall { role: "image to inpaint", width, height, min: unit });
    }
    let Some(padding) = padding else {
        return Ok(resize_inpaint(&source, mask, [width, height], unit));
    };
    let mask = resize(mask, source.width(), source.height(), Filter::Lanczos);
    let region = crop_region(&mask, width, height, padding)?;
    Ok(InpaintInputs {
        source: resize_and_fill(&region.crop(&source), width, height),
        mask: token_mask(&resize_and_fill(&region.crop(&mask), width, height), unit),
        width,
        height,
        paste: Some(PasteTarget { original: source, mask, region }),
    })
}

/// [`prepare_inpaint`] without padding for an image of another size: source and mask are resized to it, as
/// [`prepare_init`](crate::prepare_init) does without a mask.
pub fn prepare_inpaint_sized(
    source: &RgbImage,
    mask: &GrayImage,
    width: Option<u32>,
    height: Option<u32>,
    unit: u32,
) -> Result<InpaintInputs> {
    let own = shrink(source);
    let (width, height) = init_size(source, width, height, unit)?;
    // The size it has anyway: shrunk first, so that a recipe with this size gives the same image.
    let unchanged = (width, height) == (round_down(own.width(), unit), round_down(own.height(), unit));
    Ok(resize_inpaint(if unchanged { &own } else { source }, mask, [width, height], unit))
}

fn resize_inpaint(
    source: &RgbImage,
    mask: &GrayImage,
    [width, height]: [u32; 2],
    unit: u32,
) -> InpaintInputs {
    // In one step from the mask's own size: an intermediate resize to the source's size would move its edges.
    let mask = token_mask(&resize(mask, width, height, Filter::Lanczos), unit);
    let source = resize(source, width, height, Filter::Lanczos);
    InpaintInputs { source, mask, width, height, paste: None }
}

/// Reduces the mask to one value per token: thresholded at half brightness, then torch's bilinear `interpolate`
/// without antialiasing, which at an even fraction of the size is the mean of the four pixels around each token's centre.
fn token_mask(mask: &GrayImage, unit: u32) -> Vec<f32> {
    let quarter = |x: u32, y: u32| if mask.row(y)[x as usize] >= 128 { 0.25 } else { 0.0 };
    let (columns, rows) = (mask.width() / unit, mask.height() / unit);
    let centre = |token: u32| (token * unit + unit / 2 - 1, token * unit + unit / 2);
    let token = |row: u32, column: u32| {
        let ((x1, x2), (y1, y2)) = (centre(column), centre(row));
        quarter(x1, y1) + quarter(x2, y1) + quarter(x1, y2) + quarter(x2, y2)
    };
    (0..rows)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .map(|(r, c)| token(r, c))
        .collect()
}

/// Returns the bounding box of all that is not black, `padding` wider on each side, then extended to the aspect
/// ratio of `width` by `height` as far as the mask reaches.
fn crop_region(mask: &GrayImage, width: u32, height: u32, padding: u32) -> Result<Region> {
    let row_is_black = |y: &u32| mask.row(*y).iter().all(|&v| v == 0);
    let column_is_black = |x: &u32| (0..mask.height()).all(|y| mask.row(y)[*x as usize] == 0);
    let (columns, rows) = (0..mask.width(), 0..mask.height());
    let Some(top) = rows.clone().find(|y| !row_is_black(y)) else {
        return Err(Error::EmptyMask { width: mask.width(), height: mask.height() });
    };
    let bottom = rows.clone().rfind(|y| !row_is_black(y)).unwrap_or(top) + 1;
    let left = columns.clone().find(|x| !column_is_black(x)).unwrap_or(0);
    let right = columns.clone().rfind(|x| !column_is_black(x)).unwrap_or(left) + 1;

    let mut across = pad(left, right, padding, mask.width());
    let mut down = pad(top, bottom, padding, mask.height());
    let ratio = f64::from(width) / f64::from(height);
    let (columns, rows) = (across.1 - across.0, down.1 - down.0);
    if columns as f64 / rows as f64 > ratio {
        down = widen(down, (columns as f64 / ratio - rows as f64) as i64, mask.height());
    } else {
        across = widen(across, (rows as f64 * ratio - columns as f64) as i64, mask.width());
    }
    let [left, top, right, bottom] = [across.0, down.0, across.1, down.1].map(|v| v as u32);
    Ok(Region { left, top, right, bottom })
}

fn pad(start: u32, end: u32, padding: u32, limit: u32) -> (i64, i64) {
    (i64::from(start.saturating_sub(padding)), i64::from(end.saturating_add(padding).min(limit)))
}

/// Extends a span by `extra`, half at each end; then moves it back inside `0..limit`, and cuts it if it is too long.
fn widen((mut start, mut end): (i64, i64), extra: i64, limit: u32) -> (i64, i64) {
    let limit = i64::from(limit);
    start -= extra.div_euclid(2);
    end += extra - extra.div_euclid(2);
    let beyond = (end - limit).max(0);
    (start, end) = (start - beyond, end - beyond);
    let before = (-start).max(0);
    (start + before, (end + before).min(limit))
}

/// Scales an image to fit, centres it, and fills the remaining border with its edge pixels.
fn resize_and_fill<const C: usize>(image: &Raster<C>, width: u32, height: u32) -> Raster<C> {
    let fit =
        |side: u32, from: u32, to: u32| (u64::from(side) * u64::from(to) / u64::from(from)).max(1) as u32;
    let ratio = f64::from(width) / f64::from(height);
    let own_ratio = f64::from(image.width()) / f64::from(image.height());
    let fit_width = if ratio < own_ratio { width } else { fit(image.width(), image.height(), height) };
    let fit_height = if ratio < own_ratio { fit(image.height(), image.width(), width) } else { height };

    let resized = resize(image, fit_width, fit_height, Filter::Lanczos);
    let (left, top) = (width / 2 - fit_width / 2, height / 2 - fit_height / 2);
    let mut out = Raster::black(width, height);
    out.paste(&resized, i64::from(left), i64::from(top));
    // Pillow resizes an empty strip at the edge, with its default filter: see `Axis::span`.
    let whole = |size: u32| Axis { size, span: 0..size };
    let edge = |size: u32, at: u32| Axis { size, span: at..at };
    if ratio < own_ratio && top > 0 {
        let strip = |at: u32| resize_spans(&resized, whole(width), edge(top, at), Filter::Bicubic);
        out.paste(&strip(0), 0, 0);
        out.paste(&strip(fit_height), 0, i64::from(top + fit_height));
    } else if ratio > own_ratio && left > 0 {
        let strip = |at: u32| resize_spans(&resized, edge(left, at), whole(height), Filter::Bicubic);
        out.paste(&strip(0), 0, 0);
        out.paste(&strip(fit_width), i64::from(left + fit_width), 0);
    }
    out
}

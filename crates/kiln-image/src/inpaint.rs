//! Source and mask for inpainting, as `Flux2KleinInpaintPipeline` prepares them.
//!
//! Without padding the whole picture is worked on: source and mask are *resized* to multiples of 16, where a
//! reference would be cropped. With padding only the surroundings of the mask are: a region around it, widened
//! to the picture's proportions, is enlarged to the picture's size, and [`paste_back`](crate::paste_back) puts the
//! result into the source again.

use crate::prepare::{MULTIPLE, round_down, shrink};
use crate::resample::{Axis, resize_spans};
use crate::{Error, Filter, GrayPicture, Picture, Raster, Result, resize};

/// What inpainting starts from.
#[derive(Clone, Debug)]
pub struct Inpaint {
    /// The picture to encode, `width` by `height`.
    pub source: Picture,
    /// How much of each token may change, 0 to 1, by rows: `[height / 16, width / 16]`.
    pub mask: Vec<f32>,
    /// Width of the picture to generate, a multiple of 16.
    pub width: u32,
    /// Height of the picture to generate, a multiple of 16.
    pub height: u32,
    /// Where the result goes, when only a region is worked on.
    pub paste: Option<Paste>,
}

/// The picture that a region was taken from.
#[derive(Clone, Debug)]
pub struct Paste {
    /// The source, shrunk if it was over a megapixel but not rounded to multiples of 16.
    pub original: Picture,
    /// The mask, at the same size.
    pub mask: GrayPicture,
    /// The region that was worked on.
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
    /// Columns.
    pub fn width(&self) -> u32 {
        self.right - self.left
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.bottom - self.top
    }

    fn of<const C: usize>(&self, picture: &Raster<C>) -> Raster<C> {
        picture.crop(i64::from(self.left), i64::from(self.top), self.width(), self.height())
    }
}

/// Prepares `source` and `mask` (white changes, black stays), with `padding` pixels around the mask when only its
/// surroundings are to be worked on.
///
/// A mask of another size is stretched over the source. diffusers does the same without padding, and fails with it.
pub fn prepare_inpaint(source: &Picture, mask: &GrayPicture, padding: Option<u32>) -> Result<Inpaint> {
    let source = shrink(source);
    let (width, height) = (round_down(source.width()), round_down(source.height()));
    if width == 0 || height == 0 {
        let (width, height) = (source.width(), source.height());
        return Err(Error::TooSmall { role: "picture to inpaint", width, height, min: MULTIPLE });
    }
    let Some(padding) = padding else {
        // In one step from the mask's own size: going through the source's size would move its edges.
        let mask = token_mask(&resize(mask, width, height, Filter::Lanczos));
        let source = resize(&source, width, height, Filter::Lanczos);
        return Ok(Inpaint { source, mask, width, height, paste: None });
    };
    let mask = resize(mask, source.width(), source.height(), Filter::Lanczos);
    let region = crop_region(&mask, width, height, padding)?;
    Ok(Inpaint {
        source: resize_and_fill(&region.of(&source), width, height),
        mask: token_mask(&resize_and_fill(&region.of(&mask), width, height)),
        width,
        height,
        paste: Some(Paste { original: source, mask, region }),
    })
}

/// The mask at one value per token: cut to 0 or 1 at half brightness, then torch's bilinear `interpolate` without
/// antialiasing, which at a sixteenth of the size is the mean of the four pixels around each token's centre.
fn token_mask(mask: &GrayPicture) -> Vec<f32> {
    let bright = |x: u32, y: u32| if mask.row(y)[x as usize] >= 128 { 0.25 } else { 0.0 };
    let (columns, rows) = (mask.width() / MULTIPLE, mask.height() / MULTIPLE);
    let centre = |token: u32| (token * MULTIPLE + MULTIPLE / 2 - 1, token * MULTIPLE + MULTIPLE / 2);
    let token = |row: u32, column: u32| {
        let ((x1, x2), (y1, y2)) = (centre(column), centre(row));
        bright(x1, y1) + bright(x2, y1) + bright(x1, y2) + bright(x2, y2)
    };
    (0..rows)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .map(|(r, c)| token(r, c))
        .collect()
}

/// The smallest rectangle around all that is not black, `padding` wider on each side, then widened or heightened
/// to the proportions of `width` by `height` as far as the mask reaches.
fn crop_region(mask: &GrayPicture, width: u32, height: u32, padding: u32) -> Result<Region> {
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

/// `span` longer by `extra`, half of it at each end; moved back inside `0..limit`, and cut where it is too long.
fn widen((mut start, mut end): (i64, i64), extra: i64, limit: u32) -> (i64, i64) {
    let limit = i64::from(limit);
    start -= extra.div_euclid(2);
    end += extra - extra.div_euclid(2);
    let beyond = (end - limit).max(0);
    (start, end) = (start - beyond, end - beyond);
    let before = (-start).max(0);
    (start + before, (end + before).min(limit))
}

/// Enlarges or shrinks a picture until it fits, centres it, and fills what is left at two sides with its edges.
fn resize_and_fill<const C: usize>(picture: &Raster<C>, width: u32, height: u32) -> Raster<C> {
    let fit =
        |side: u32, from: u32, to: u32| (u64::from(side) * u64::from(to) / u64::from(from)).max(1) as u32;
    let ratio = f64::from(width) / f64::from(height);
    let own_ratio = f64::from(picture.width()) / f64::from(picture.height());
    let fit_width = if ratio < own_ratio { width } else { fit(picture.width(), picture.height(), height) };
    let fit_height = if ratio < own_ratio { fit(picture.height(), picture.width(), width) } else { height };

    let resized = resize(picture, fit_width, fit_height, Filter::Lanczos);
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

//! Pictures to bytes, with the recipe they were made from inside.

use std::fmt;
use std::path::Path;

use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::{ExtendedColorType, ImageEncoder};

use crate::recipe::KEYWORD;
use crate::{Error, Picture, Result, exif, jpeg, strips};

/// JPEG quality: high enough that the loss is not seen.
const JPEG_QUALITY: u8 = 95;

/// A format that pictures are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lossless; the recipe is an `iTXt` chunk.
    Png,
    /// Quality 95, full colour resolution; the recipe is in comment segments.
    Jpeg,
    /// Lossless; the recipe is the EXIF user comment.
    Webp,
}

impl Format {
    /// The format that the file name's extension asks for.
    pub fn from_path(path: &Path) -> Result<Self> {
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some("png") => Ok(Format::Png),
            Some("jpg" | "jpeg") => Ok(Format::Jpeg),
            Some("webp") => Ok(Format::Webp),
            other => {
                let found = other.map_or("no extension".into(), |e| format!(".{e}"));
                Err(Error::Format { path: path.into(), found })
            }
        }
    }

    /// The usual file name extension, without the dot.
    pub fn extension(self) -> &'static str {
        match self {
            Format::Png => "png",
            Format::Jpeg => "jpg",
            Format::Webp => "webp",
        }
    }

    /// The media type, as HTTP names it.
    pub fn media_type(self) -> &'static str {
        match self {
            Format::Png => "image/png",
            Format::Jpeg => "image/jpeg",
            Format::Webp => "image/webp",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Png => "PNG",
            Format::Jpeg => "JPEG",
            Format::Webp => "WebP",
        })
    }
}

/// A format, and how it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// The format.
    pub format: Format,
    /// JPEG quality from 0 to 100; 95 when absent.
    pub quality: Option<u8>,
    /// PNG files as small as they get, many times slower than the usual ones.
    pub small: bool,
}

impl From<Format> for Encoding {
    fn from(format: Format) -> Encoding {
        Encoding { format, quality: None, small: false }
    }
}

/// The bytes of a picture file. [`read_recipe`](crate::read_recipe) finds `recipe` in them again.
///
/// The same picture and recipe always give the same bytes.
pub fn encode(picture: &Picture, format: Format, recipe: Option<&str>) -> Result<Vec<u8>> {
    encode_as(picture, format.into(), recipe)
}

/// [`encode`] with a say in how.
pub fn encode_as(picture: &Picture, encoding: Encoding, recipe: Option<&str>) -> Result<Vec<u8>> {
    let format = encoding.format;
    let result = match format {
        Format::Png => png(picture, encoding.small, recipe).map_err(|error| error.to_string()),
        Format::Jpeg => jpeg(picture, encoding.quality, recipe).map_err(|error| error.to_string()),
        Format::Webp => webp(picture, recipe).map_err(|error| error.to_string()),
    };
    let (width, height) = (picture.width(), picture.height());
    result.map_err(|reason| Error::Encode { format, width, height, reason })
}

fn png(picture: &Picture, small: bool, recipe: Option<&str>) -> Result<Vec<u8>, png::EncodingError> {
    let quick = png_file(picture, recipe, |writer| {
        strips::chunks(picture).iter().try_for_each(|chunk| writer.write_chunk(png::chunk::IDAT, chunk))
    })?;
    if !small {
        return Ok(quick);
    }
    let thorough = png_file(picture, recipe, |writer| writer.write_image_data(picture.pixels()))?;
    // grain has no repetitions to find: there the search costs more than it saves
    Ok(if thorough.len() < quick.len() { thorough } else { quick })
}

fn png_file(
    picture: &Picture,
    recipe: Option<&str>,
    write: impl FnOnce(&mut png::Writer<&mut Vec<u8>>) -> Result<(), png::EncodingError>,
) -> Result<Vec<u8>, png::EncodingError> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, picture.width(), picture.height());
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    if let Some(recipe) = recipe {
        encoder.add_itxt_chunk(KEYWORD.into(), recipe.into())?;
    }
    let mut writer = encoder.write_header()?;
    write(&mut writer)?;
    writer.finish()?;
    Ok(out)
}

fn jpeg(picture: &Picture, quality: Option<u8>, recipe: Option<&str>) -> image::ImageResult<Vec<u8>> {
    let mut out = Vec::new();
    let encoder = JpegEncoder::new_with_quality(&mut out, quality.map_or(JPEG_QUALITY, |q| q.clamp(1, 100)));
    encoder.write_image(picture.pixels(), picture.width(), picture.height(), ExtendedColorType::Rgb8)?;
    Ok(match recipe {
        Some(recipe) => jpeg::with_comment(&out, crate::recipe::COMMENT_TAG, recipe.as_bytes()),
        None => out,
    })
}

fn webp(picture: &Picture, recipe: Option<&str>) -> image::ImageResult<Vec<u8>> {
    let mut out = Vec::new();
    let mut encoder = WebPEncoder::new_lossless(&mut out);
    if let Some(recipe) = recipe {
        encoder.set_exif_metadata(exif::write(KEYWORD, recipe)).map_err(image::ImageError::Unsupported)?;
    }
    encoder.write_image(picture.pixels(), picture.width(), picture.height(), ExtendedColorType::Rgb8)?;
    Ok(out)
}

//! Encoding images, with the recipe that generated them embedded.

use std::fmt;
use std::path::Path;

use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::{ExtendedColorType, ImageEncoder};

use crate::recipe::{KEYWORD, PARAMETERS};
use crate::{Error, Result, RgbImage, exif, jpeg, png_strips};

/// Default JPEG quality: high enough that no loss is visible.
const JPEG_QUALITY: u8 = 95;

/// An output format.
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
    /// Returns the format that the path's extension names.
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

    /// The MIME type.
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

/// An output format with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// The format.
    pub format: Format,
    /// JPEG quality from 0 to 100; 95 when absent.
    pub quality: Option<u8>,
    /// Makes PNG files as small as possible, which takes many times longer.
    pub small: bool,
}

impl From<Format> for Encoding {
    fn from(format: Format) -> Encoding {
        Encoding { format, quality: None, small: false }
    }
}

/// Encodes an image. [`read_recipe`](crate::read_recipe) finds `recipe` in the bytes.
///
/// The same image and recipe always give the same bytes.
pub fn encode(image: &RgbImage, format: Format, recipe: Option<&str>) -> Result<Vec<u8>> {
    encode_with(image, format.into(), recipe)
}

/// Encodes an image with the given options, otherwise as [`encode`].
pub fn encode_with(image: &RgbImage, encoding: Encoding, recipe: Option<&str>) -> Result<Vec<u8>> {
    encode_with_parameters(image, encoding, recipe, None)
}

/// As [`encode_with`]; a PNG also gets the text `parameters`, under which A1111 and others describe an image.
pub fn encode_with_parameters(
    image: &RgbImage,
    encoding: Encoding,
    recipe: Option<&str>,
    parameters: Option<&str>,
) -> Result<Vec<u8>> {
    let format = encoding.format;
    let texts = [(KEYWORD, recipe), (PARAMETERS, parameters)];
    let result = match format {
        Format::Png => png(image, encoding.small, &texts).map_err(|error| error.to_string()),
        Format::Jpeg => jpeg(image, encoding.quality, recipe).map_err(|error| error.to_string()),
        Format::Webp => webp(image, recipe).map_err(|error| error.to_string()),
    };
    let (width, height) = (image.width(), image.height());
    result.map_err(|reason| Error::Encode { format, width, height, reason })
}

/// Texts of a PNG with their keywords.
type Texts<'a> = [(&'static str, Option<&'a str>)];

fn png(image: &RgbImage, small: bool, texts: &Texts<'_>) -> Result<Vec<u8>, png::EncodingError> {
    let fast = png_file(image, texts, |writer| {
        png_strips::idat_chunks(image)
            .iter()
            .try_for_each(|chunk| writer.write_chunk(png::chunk::IDAT, chunk))
    })?;
    if !small {
        return Ok(fast);
    }
    let small = png_file(image, texts, |writer| writer.write_image_data(image.pixels()))?;
    // Film grain has no repeated strings: there the thorough search may give a larger file.
    Ok(if small.len() < fast.len() { small } else { fast })
}

fn png_file(
    image: &RgbImage,
    texts: &Texts<'_>,
    write: impl FnOnce(&mut png::Writer<&mut Vec<u8>>) -> Result<(), png::EncodingError>,
) -> Result<Vec<u8>, png::EncodingError> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, image.width(), image.height());
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    for (keyword, text) in texts {
        match text {
            // Many programs look for A1111's parameters in plain text chunks only.
            Some(text) if *keyword == PARAMETERS && text.is_ascii() && !text.contains('\0') => {
                encoder.add_text_chunk((*keyword).into(), (*text).into())?;
            }
            Some(text) => encoder.add_itxt_chunk((*keyword).into(), (*text).into())?,
            None => {}
        }
    }
    let mut writer = encoder.write_header()?;
    write(&mut writer)?;
    writer.finish()?;
    Ok(out)
}

fn jpeg(image: &RgbImage, quality: Option<u8>, recipe: Option<&str>) -> image::ImageResult<Vec<u8>> {
    let mut out = Vec::new();
    let encoder = JpegEncoder::new_with_quality(&mut out, quality.map_or(JPEG_QUALITY, |q| q.clamp(1, 100)));
    encoder.write_image(image.pixels(), image.width(), image.height(), ExtendedColorType::Rgb8)?;
    Ok(match recipe {
        Some(recipe) => jpeg::with_comment(&out, crate::recipe::COMMENT_TAG, recipe.as_bytes()),
        None => out,
    })
}

fn webp(image: &RgbImage, recipe: Option<&str>) -> image::ImageResult<Vec<u8>> {
    let mut out = Vec::new();
    let mut encoder = WebPEncoder::new_lossless(&mut out);
    if let Some(recipe) = recipe {
        encoder.set_exif_metadata(exif::write(KEYWORD, recipe)).map_err(image::ImageError::Unsupported)?;
    }
    encoder.write_image(image.pixels(), image.width(), image.height(), ExtendedColorType::Rgb8)?;
    Ok(out)
}

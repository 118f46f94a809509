//! Encoding images, with what the file says of their origin.

use std::path::Path;

use crate::recipe::{KEYWORD, PARAMETERS};
use crate::{AiMark, Error, Format, Result, RgbImage, ai_mark, exif, jpeg, jpeg_strips, png_strips, webp};

/// Default JPEG quality: high enough that no loss is visible.
const JPEG_QUALITY: u8 = 95;

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
}

/// An output format with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// The format.
    pub format: Format,
    /// Quality of JPEG and WebP, from 0 to 100. Without one, JPEG has 95 and WebP is lossless.
    pub quality: Option<u8>,
    /// Makes PNG files as small as possible, which takes many times longer.
    pub small: bool,
}

impl Encoding {
    /// Returns the longest side that such a file can have, in pixels.
    pub fn max_side(self) -> u32 {
        match (self.format, self.quality) {
            (Format::Png, _) => i32::MAX as u32,
            (Format::Jpeg, _) => u32::from(u16::MAX),
            (Format::Webp, None) => webp::MAX_LOSSLESS_SIDE,
            (Format::Webp, Some(_)) => webp::MAX_SIDE,
        }
    }

    /// Refuses a size that such a file can't have: before the work, rather than after it.
    pub fn check_size(self, width: u32, height: u32) -> Result<()> {
        let max = self.max_side();
        if width.max(height) <= max {
            return Ok(());
        }
        let reason = format!("at most {max} pixels a side are possible");
        Err(Error::Encode { format: self.format, width, height, reason })
    }
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
    encode_with_metadata(image, encoding, &Metadata { recipe, ..Metadata::default() })
}

/// What a file says besides its pixels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Metadata<'a> {
    /// How the image was generated.
    pub recipe: Option<&'a str>,
    /// The `parameters` by which A1111 and others describe an image: a text of that name in PNG, the EXIF user comment in
    /// JPEG and WebP.
    pub parameters: Option<&'a str>,
    /// That a model made the image.
    pub ai_mark: Option<&'a AiMark>,
}

/// Encodes an image with the given options and metadata, otherwise as [`encode`].
pub fn encode_with_metadata(
    image: &RgbImage,
    encoding: Encoding,
    metadata: &Metadata<'_>,
) -> Result<Vec<u8>> {
    let Metadata { recipe, parameters, ai_mark } = *metadata;
    let format = encoding.format;
    encoding.check_size(image.width(), image.height())?;
    let xmp = ai_mark.map(AiMark::packet);
    let result = match format {
        Format::Png => {
            let texts = [(KEYWORD, recipe), (PARAMETERS, parameters), (ai_mark::PNG_KEYWORD, xmp.as_deref())];
            png(image, encoding.small, &texts).map_err(|error| error.to_string())
        }
        Format::Jpeg => Ok(jpeg(image, encoding.quality, recipe, parameters, xmp)),
        Format::Webp => {
            let has_texts = recipe.is_some() || parameters.is_some();
            let exif = has_texts.then(|| exif::write(KEYWORD, recipe, parameters));
            webp::encode(image, encoding.quality, exif, xmp)
        }
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

fn jpeg(
    image: &RgbImage,
    quality: Option<u8>,
    recipe: Option<&str>,
    parameters: Option<&str>,
    xmp: Option<String>,
) -> Vec<u8> {
    let mut out = jpeg_strips::encode(image, quality.unwrap_or(JPEG_QUALITY));
    if let Some(recipe) = recipe {
        out = jpeg::with_comment(&out, crate::recipe::COMMENT_TAG, recipe.as_bytes());
    }
    if let Some(xmp) = xmp {
        out = jpeg::with_app1(&out, ai_mark::JPEG_TAG, xmp.as_bytes());
    }
    if let Some(parameters) = parameters {
        out = jpeg::with_app1(&out, exif::JPEG_TAG, &exif::write(KEYWORD, None, Some(parameters)));
    }
    out
}

//! Decoding image files to RGB, exactly as Pillow's `exif_transpose` followed by `convert("RGB")` gives it.
//!
//! Alpha is dropped, not blended: a transparent pixel shows the colour stored in it. Sixteen bits are scaled to
//! eight, where Pillow turns 16-bit grey above 255 into white. Colour profiles are ignored.

use std::borrow::Cow;
use std::io::{Cursor, Read};
use std::path::Path;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader};

use crate::header::Header;
use crate::limits::{MAX_BYTES, MAX_SIDE};
use crate::{Error, GrayImage, Result, RgbImage, counters, jpeg, png_chunks};

/// Most bytes that decoding may take for what is not a pixel: copies of the file, tables, frames that are larger.
const MAX_BESIDE_PIXELS: u64 = 4 * MAX_BYTES;

/// Reads an image file: PNG, JPEG, WebP, GIF, BMP or TIFF, recognized by content and not by name.
///
/// Applies the EXIF orientation. Of animations and multi-page files, reads the first frame.
pub fn open(path: &Path) -> Result<RgbImage> {
    from_bytes(&path.display().to_string(), &read(path)?)
}

/// Reads a mask: [`open`], then luma as Pillow's `convert("L")` computes it.
pub fn open_gray(path: &Path) -> Result<GrayImage> {
    Ok(GrayImage::from(&open(path)?))
}

/// Decodes an image in memory. Errors call it `name`.
pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<RgbImage> {
    let (image, format) = decode(name, bytes)?;
    let damaged = |reason: String| Error::Damaged { name: name.into(), format, reason };
    to_rgb(image).map_err(damaged)
}

/// Returns the width and height in an image's header, without decoding the pixels.
pub fn dimensions(name: &str, bytes: &[u8]) -> Result<(u32, u32)> {
    let header = header(name, bytes)?;
    Ok((header.width, header.height))
}

/// Returns the most memory that decoding an image takes, in bytes, from its headers: the stored pixels, the decoder's own
/// buffers or a rotated copy, the RGB result, and what lies beside the pixels. Takes hardly any itself.
pub fn decoding_bytes(name: &str, bytes: &[u8]) -> Result<u64> {
    Ok(header(name, bytes)?.memory())
}

fn header(name: &str, bytes: &[u8]) -> Result<Header> {
    let (format, format_name) = sniff(name, bytes)?;
    Header::read(format, bytes).map_err(|reason| Error::Damaged {
        name: name.into(),
        format: format_name,
        reason,
    })
}

/// Decodes an image, and its transparency as a mask: white where transparent, black where opaque; `None` if opaque everywhere.
pub fn from_bytes_with_mask(name: &str, bytes: &[u8]) -> Result<(RgbImage, Option<GrayImage>)> {
    let (image, format) = decode(name, bytes)?;
    let damaged = |reason: String| Error::Damaged { name: name.into(), format, reason };
    let mut mask = None;
    if image.color().has_alpha() {
        let alpha: Vec<u8> = image.to_rgba8().pixels().map(|pixel| 255 - pixel.0[3]).collect();
        if alpha.iter().any(|value| *value > 0) {
            let gray = GrayImage::new(image.width(), image.height(), alpha);
            mask = Some(gray.map_err(|error| damaged(error.to_string()))?);
        }
    }
    Ok((to_rgb(image).map_err(damaged)?, mask))
}

/// Decodes the stored pixel type, with the orientation applied. Also returns the format's name.
fn decode(name: &str, bytes: &[u8]) -> Result<(DynamicImage, &'static str)> {
    let (format, format_name) = sniff(name, bytes)?;
    let damaged = |reason: String| Error::Damaged { name: name.into(), format: format_name, reason };
    if !is_complete(format, bytes) {
        return Err(damaged("the file is truncated".into()));
    }

    let header = Header::read(format, bytes).map_err(damaged)?;
    let Header { width, height, .. } = header;
    let too_large = |bytes: u64| Error::TooLarge { name: name.into(), width, height, bytes };
    if width > MAX_SIDE || height > MAX_SIDE {
        return Err(too_large(u64::from(width).saturating_mul(u64::from(height)).saturating_mul(3)));
    }
    if header.beside_pixels() > MAX_BESIDE_PIXELS {
        let (found, most) = (header.beside_pixels() >> 20, MAX_BESIDE_PIXELS >> 20);
        return Err(damaged(format!("beside its pixels it needs {found} MiB; at most {most} MiB are used")));
    }
    let bytes =
        if format == ImageFormat::Png { png_chunks::for_decoding(bytes) } else { Cow::Borrowed(bytes) };
    let mut reader = ImageReader::with_format(Cursor::new(&bytes[..]), format);
    reader.limits(limits(header.memory()));
    let decoder = reader.into_decoder();
    let mut decoder = decoder.map_err(|error| damaged(error.to_string()))?;
    if decoder.dimensions() != (width, height) {
        return Err(damaged("its headers disagree about its size".into()));
    }
    let stored = decoder.total_bytes();
    if stored > MAX_BYTES {
        return Err(too_large(stored));
    }
    let orientation = orientation(&mut decoder, format);
    counters::count_decoded();
    let mut image = DynamicImage::from_decoder(decoder).map_err(|error| match error {
        ImageError::Limits(_) => too_large(stored),
        error => damaged(error.to_string()),
    })?;
    image.apply_orientation(orientation);
    Ok((image, format_name))
}

/// Reads a file of at most [`MAX_BYTES`].
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let unreadable = |source| Error::Read { path: path.into(), source };
    let mut bytes = Vec::new();
    let file = kiln_base::open_input(path).map_err(unreadable)?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::FileTooLarge { name: path.display().to_string(), limit: MAX_BYTES });
    }
    Ok(bytes)
}

fn limits(memory: u64) -> image::Limits {
    let mut limits = image::Limits::default();
    // `decode` checks the sides itself, for an error that names them.
    limits.max_image_width = None;
    limits.max_image_height = None;
    limits.max_alloc = Some(memory);
    limits
}

/// Recognizes the format by content; an error if it is not one of those that are read.
pub(crate) fn sniff(name: &str, bytes: &[u8]) -> Result<(ImageFormat, &'static str)> {
    let format = image::guess_format(bytes).ok();
    let format_name = format.and_then(|format| match format {
        ImageFormat::Png => Some("PNG"),
        ImageFormat::Jpeg => Some("JPEG"),
        ImageFormat::WebP => Some("WebP"),
        ImageFormat::Gif => Some("GIF"),
        ImageFormat::Bmp => Some("BMP"),
        ImageFormat::Tiff => Some("TIFF"),
        _ => None,
    });
    format
        .zip(format_name)
        .ok_or_else(|| Error::NotAnImage { name: name.into(), found: describe(bytes).into() })
}

/// Whether the file is complete, for the formats whose decoders fill in a missing end.
fn is_complete(format: ImageFormat, bytes: &[u8]) -> bool {
    match (format, bytes) {
        (ImageFormat::Jpeg, _) => jpeg::is_complete(bytes),
        (ImageFormat::WebP, [_, _, _, _, a, b, c, d, rest @ ..]) => {
            rest.len() as u64 >= u64::from(u32::from_le_bytes([*a, *b, *c, *d]))
        }
        _ => true,
    }
}

/// Names of formats that are recognized, but not read.
const AVIF: &str = "AVIF";
const HEIC: &str = "HEIC";

impl Error {
    /// Returns the program that converts the file, if it is an AVIF or HEIC image.
    pub fn converter(&self) -> Option<&'static str> {
        match self {
            Error::NotAnImage { found, .. } if found == AVIF => Some("avifdec"),
            Error::NotAnImage { found, .. } if found == HEIC => Some("heif-dec"),
            _ => None,
        }
    }
}

/// Describes what unsupported bytes look like, for the error message.
fn describe(bytes: &[u8]) -> &'static str {
    let head = &bytes[..bytes.len().min(512)];
    let brand = head.get(4..12).unwrap_or_default();
    // A file that is both lists the brands it is compatible with.
    let is_avif = || head.chunks_exact(4).skip(2).take(8).any(|brand| brand == b"avif" || brand == b"avis");
    let is_text = match std::str::from_utf8(head) {
        Ok(_) => !head.iter().any(|byte| *byte < b'\t'),
        // The cut may split a character.
        Err(error) => error.error_len().is_none() && bytes.len() > head.len(),
    };
    match head {
        [] => "an empty file",
        _ if brand.starts_with(b"ftyp") && is_avif() => AVIF,
        _ if brand.starts_with(b"ftyphe") || brand.starts_with(b"ftypm") && brand.ends_with(b"f1") => HEIC,
        _ if brand.starts_with(b"ftyp") => "a video",
        [0xff, 0x0a, ..] | [0, 0, 0, 12, b'J', b'X', b'L', ..] => "JPEG XL",
        [b'%', b'P', b'D', b'F', ..] => "PDF",
        [b'P', b'K', 3, 4, ..] => "a ZIP archive",
        [b'8', b'B', b'P', b'S', ..] => "a Photoshop file",
        _ if is_text && head.trim_ascii_start().starts_with(b"<") => "HTML, XML or SVG text",
        _ if is_text => "text",
        _ => "unknown binary data",
    }
}

/// Returns the orientation from EXIF, or else from XMP, as Pillow does.
fn orientation(decoder: &mut impl ImageDecoder, format: ImageFormat) -> Orientation {
    if format == ImageFormat::Tiff {
        // In TIFF it is a tag of the image itself.
        return decoder.orientation().unwrap_or(Orientation::NoTransforms);
    }
    let exif = decoder.exif_metadata().ok().flatten();
    exif.and_then(|exif| Orientation::from_exif_chunk(&exif))
        .or_else(|| xmp_orientation(&decoder.xmp_metadata().ok().flatten()?))
        .unwrap_or(Orientation::NoTransforms)
}

/// Parses the digit after `tiff:Orientation="` or `tiff:Orientation>`.
fn xmp_orientation(xmp: &[u8]) -> Option<Orientation> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut matches = xmp.windows(NAME.len()).enumerate().filter(|(_, name)| *name == NAME);
    let digit = matches.find_map(|(at, _)| match xmp[at + NAME.len()..] {
        [b'=', b'"', digit @ b'0'..=b'9', ..] | [b'>', digit @ b'0'..=b'9', ..] => Some(digit - b'0'),
        _ => None,
    })?;
    Orientation::from_exif(digit)
}

fn to_rgb(image: DynamicImage) -> Result<RgbImage, String> {
    let (width, height) = (image.width(), image.height());
    let pixels = match image {
        DynamicImage::ImageRgb8(p) => p.into_raw(),
        DynamicImage::ImageLuma8(p) => gray(&p, 1, |v| v),
        DynamicImage::ImageLumaA8(p) => gray(&p, 2, |v| v),
        DynamicImage::ImageRgba8(p) => color(&p, 4, |v| v),
        DynamicImage::ImageLuma16(p) => gray(&p, 1, narrow),
        DynamicImage::ImageLumaA16(p) => gray(&p, 2, narrow),
        DynamicImage::ImageRgb16(p) => color(&p, 3, narrow),
        DynamicImage::ImageRgba16(p) => color(&p, 4, narrow),
        DynamicImage::ImageRgb32F(p) => color(&p, 3, |v| (v * 255.0).round() as u8),
        DynamicImage::ImageRgba32F(p) => color(&p, 4, |v| (v * 255.0).round() as u8),
        other => return Err(format!("pixels of type {:?}", other.color())),
    };
    RgbImage::new(width, height, pixels).map_err(|error| error.to_string())
}

fn gray<T: Copy>(samples: &[T], channels: usize, to_byte: impl Fn(T) -> u8) -> Vec<u8> {
    samples.chunks_exact(channels).flat_map(|pixel| [to_byte(pixel[0]); 3]).collect()
}

fn color<T: Copy>(samples: &[T], channels: usize, to_byte: impl Fn(T) -> u8) -> Vec<u8> {
    let rgb = |pixel: &[T]| [to_byte(pixel[0]), to_byte(pixel[1]), to_byte(pixel[2])];
    samples.chunks_exact(channels).flat_map(rgb).collect()
}

/// Converts sixteen bits to eight: `v / 257`, rounded.
fn narrow(value: u16) -> u8 {
    ((u32::from(value) + 128) / 257) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_are_scaled_and_rounded() {
        assert_eq!(
            [0, 128, 129, 257, 385, 386, 65406, 65407, 65535].map(narrow),
            [0, 0, 1, 1, 1, 2, 254, 255, 255]
        );
    }

    #[test]
    fn decoding_memory_counts_the_bytes_of_a_pixel() {
        let bytes_of = |image: DynamicImage, format| {
            let mut file = Cursor::new(Vec::new());
            image.write_to(&mut file, format).unwrap();
            decoding_bytes("a", file.get_ref()).unwrap() - 3 * file.get_ref().len() as u64
        };
        let bytes = |image| bytes_of(image, ImageFormat::Png);
        let pixels = 64 * 128;
        assert_eq!(bytes(DynamicImage::new_rgb8(64, 100)), pixels * (2 * 4 + 3));
        assert_eq!(bytes(DynamicImage::new_luma8(64, 100)), pixels * (2 * 2 + 3));
        assert_eq!(bytes(DynamicImage::new_rgba16(64, 100)), pixels * (2 * 8 + 3));
        assert_eq!(bytes_of(DynamicImage::new_rgb8(64, 100), ImageFormat::Jpeg), pixels * 12);
        assert_eq!(bytes_of(DynamicImage::new_rgb8(64, 100), ImageFormat::Bmp), pixels * 11);
        assert!(decoding_bytes("a", b"no image").is_err());
    }

    #[test]
    fn xmp_names_the_orientation_as_attribute_or_element() {
        let found = |xmp: &str| xmp_orientation(xmp.as_bytes()).map(Orientation::to_exif);
        assert_eq!(found(r#"<x tiff:Orientation="6"/>"#), Some(6));
        assert_eq!(found("<tiff:Orientation>3</tiff:Orientation>"), Some(3));
        assert_eq!(found("tiff:Orientation tiff:Orientation='6'"), None);
        assert_eq!(found("tiff:Orientation=\"9\""), None);
        assert_eq!(found("tiff:Orientation"), None);
    }

    #[test]
    fn unsupported_bytes_are_described() {
        assert_eq!(describe(b""), "an empty file");
        assert_eq!(describe(b"\n <!doctype html>"), "HTML, XML or SVG text");
        assert_eq!(describe("Grüße".as_bytes()), "text");
        assert_eq!(describe(b"\x00\x00\x00\x20ftypavif"), "AVIF");
        assert_eq!(describe(b"\x00\x01\x02\x03"), "unknown binary data");
    }
}

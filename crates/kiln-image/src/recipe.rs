//! Reading the recipe that [`encode`](crate::encode) embedded in an image.

use std::io::Cursor;

use image::codecs::webp::WebPDecoder;
use image::{ImageDecoder, ImageFormat};

use crate::decode::sniff;
use crate::{Error, Result, exif, jpeg};

/// The PNG keyword and EXIF software name of a recipe.
pub(crate) const KEYWORD: &str = "kiln";

/// The PNG keyword of A1111's description.
pub(crate) const PARAMETERS: &str = "parameters";

/// Prefix of the JPEG comments that hold the recipe.
pub(crate) const COMMENT_TAG: &[u8] = b"kiln:";

/// Longest text of a file that is returned. Compressed, it may be a thousandth of that.
const MAX_TEXT: usize = 1 << 20;

/// Returns the recipe in an image file that Kiln wrote; `None` if there is none.
///
/// The pixels are not decoded, so this also reads files that [`from_bytes`](crate::from_bytes) rejects. Add the file's
/// name to an error with [`Error::named`].
pub fn read_recipe(bytes: &[u8]) -> Result<Option<String>> {
    let name = "<bytes>";
    let (format, format_name) = sniff(name, bytes)?;
    let result = match format {
        ImageFormat::Png => png_recipe(bytes).map_err(|error| error.to_string()),
        ImageFormat::Jpeg => jpeg_recipe(bytes),
        ImageFormat::WebP => webp_recipe(bytes).map_err(|error| error.to_string()),
        _ => Ok(None),
    };
    let result = result.and_then(check_length);
    result.map_err(|reason| Error::Damaged { name: name.into(), format: format_name, reason })
}

fn check_length(text: Option<String>) -> Result<Option<String>, String> {
    match text {
        Some(text) if text.len() > MAX_TEXT => Err(format!("it holds a text of {} bytes", text.len())),
        text => Ok(text),
    }
}

/// Returns A1111's description in a PNG file, of Kiln or of another program; `None` if there is none.
pub fn read_parameters(bytes: &[u8]) -> Result<Option<String>> {
    let name = "<bytes>";
    let (format, format_name) = sniff(name, bytes)?;
    if format != ImageFormat::Png {
        return Ok(None);
    }
    let failed = |reason: String| Error::Damaged { name: name.into(), format: format_name, reason };
    let damaged = |error: png::DecodingError| failed(error.to_string());
    let mut reader = png::Decoder::new(Cursor::new(bytes)).read_info().map_err(damaged)?;
    if let Some(text) = png_parameters(reader.info()) {
        return check_length(Some(text.map_err(damaged)?)).map_err(failed);
    }
    reader.finish().map_err(damaged)?;
    check_length(png_parameters(reader.info()).transpose().map_err(damaged)?).map_err(failed)
}

/// The description in any of PNG's kinds of text chunks.
fn png_parameters(info: &png::Info<'_>) -> Option<Result<String, png::DecodingError>> {
    if let Some(text) = info.uncompressed_latin1_text.iter().find(|text| text.keyword == PARAMETERS) {
        return Some(Ok(text.text.clone()));
    }
    if let Some(text) = info.compressed_latin1_text.iter().find(|text| text.keyword == PARAMETERS) {
        let mut text = text.clone();
        return Some(text.decompress_text_with_limit(MAX_TEXT).and_then(|()| text.get_text()));
    }
    let mut text = info.utf8_text.iter().find(|text| text.keyword == PARAMETERS).cloned()?;
    Some(text.decompress_text_with_limit(MAX_TEXT).and_then(|()| text.get_text()))
}

impl Error {
    /// Replaces the file name in errors about a file's bytes; other errors are returned unchanged.
    pub fn named(mut self, file: &str) -> Error {
        match &mut self {
            Error::NotAnImage { name, .. }
            | Error::Damaged { name, .. }
            | Error::TooLarge { name, .. }
            | Error::FileTooLarge { name, .. } => file.clone_into(name),
            _ => {}
        }
        self
    }
}

fn png_recipe(bytes: &[u8]) -> Result<Option<String>, png::DecodingError> {
    let mut reader = png::Decoder::new(Cursor::new(bytes)).read_info()?;
    let find = |info: &png::Info<'_>| {
        let international = info.utf8_text.iter().find(|text| text.keyword == KEYWORD).cloned();
        international.map(|mut text| text.decompress_text_with_limit(MAX_TEXT).and_then(|()| text.get_text()))
    };
    if let Some(text) = find(reader.info()) {
        return text.map(Some);
    }
    // Programs that rewrite images often move text behind the pixels.
    reader.finish()?;
    find(reader.info()).transpose()
}

fn jpeg_recipe(bytes: &[u8]) -> Result<Option<String>, String> {
    let comments = jpeg::segments(bytes).filter(|segment| segment.marker == jpeg::COMMENT);
    let parts: Vec<_> = comments.filter_map(|comment| comment.data.strip_prefix(COMMENT_TAG)).collect();
    if parts.is_empty() {
        return Ok(None);
    }
    String::from_utf8(parts.concat()).map(Some).map_err(|error| format!("its recipe is not text: {error}"))
}

fn webp_recipe(bytes: &[u8]) -> image::ImageResult<Option<String>> {
    let block = WebPDecoder::new(Cursor::new(bytes))?.exif_metadata()?;
    Ok(block.and_then(|block| exif::read(&block, KEYWORD)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_holds_no_large_text() {
        for (length, is_read) in [(1 << 20, true), ((1 << 20) + 1, false), (64 << 20, false)] {
            let mut file = Vec::new();
            let mut encoder = png::Encoder::new(&mut file, 1, 1);
            encoder.add_ztxt_chunk(PARAMETERS.into(), "a".repeat(length)).unwrap();
            encoder.write_header().unwrap().write_image_data(&[0]).unwrap();
            assert!(file.len() < 1 << 20);
            assert_eq!(read_parameters(&file).is_ok(), is_read, "{length} bytes");
        }
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 1, 1);
        encoder.add_text_chunk(PARAMETERS.into(), "a".repeat(2 << 20)).unwrap();
        encoder.write_header().unwrap().write_image_data(&[0]).unwrap();
        assert!(read_parameters(&file).is_err(), "not compressed");
    }

    #[test]
    fn an_error_can_be_given_the_name_of_the_file() {
        let named = |bytes| read_recipe(bytes).unwrap_err().named("a.png").to_string();
        assert!(named(b"<html>").starts_with("`a.png` is not an image"));
        assert!(named(b"\x89PNG\r\n\x1a\n").starts_with("image `a.png` is damaged"));
    }
}

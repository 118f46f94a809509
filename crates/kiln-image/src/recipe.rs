//! Reading the recipe that [`encode`](crate::encode) embedded in an image.

use image::ImageFormat;

use crate::decode::sniff;
use crate::header::Header;
use crate::limits::MAX_TEXT;
use crate::{Error, Result, exif, jpeg, png_chunks, webp};

/// The PNG keyword and EXIF software name of a recipe.
pub(crate) const KEYWORD: &str = "kiln";

/// The PNG keyword of A1111's description.
pub(crate) const PARAMETERS: &str = "parameters";

/// Prefix of the JPEG comments that hold the recipe.
pub(crate) const COMMENT_TAG: &[u8] = b"kiln:";

/// Returns the recipe in an image file that Kiln wrote; `None` if there is none.
///
/// The pixels are not decoded, so this also reads files that [`from_bytes`](crate::from_bytes) rejects. Add the file's
/// name to an error with [`Error::named`].
pub fn read_recipe(bytes: &[u8]) -> Result<Option<String>> {
    let name = "<bytes>";
    let (format, format_name) = sniff(name, bytes)?;
    let text = match format {
        ImageFormat::Png => png_text(bytes, KEYWORD),
        ImageFormat::Jpeg => Ok(jpeg_recipe(bytes)),
        ImageFormat::WebP => Ok(webp_recipe(bytes)),
        _ => Ok(None),
    };
    let text = text.map_err(|reason| Error::Damaged { name: name.into(), format: format_name, reason })?;
    checked(text, name)
}

/// A text that could be read, if there is one; `None` inside means that it could not.
type FoundText = Option<Option<String>>;

fn checked(text: FoundText, name: &str) -> Result<Option<String>> {
    match text {
        None => Ok(None),
        Some(Some(text)) if text.len() <= MAX_TEXT => Ok(Some(text)),
        Some(_) => Err(Error::Text { name: name.into() }),
    }
}

/// Returns A1111's description in a PNG file, of Kiln or of another program; `None` if there is none.
pub fn read_parameters(bytes: &[u8]) -> Result<Option<String>> {
    let name = "<bytes>";
    let (format, format_name) = sniff(name, bytes)?;
    if format != ImageFormat::Png {
        return Ok(None);
    }
    let failed = |reason| Error::Damaged { name: name.into(), format: format_name, reason };
    checked(png_text(bytes, PARAMETERS).map_err(failed)?, name)
}

/// Finds a text before the pixels or, as programs that rewrite images often have it, behind them.
fn png_text(bytes: &[u8], keyword: &str) -> Result<FoundText, String> {
    Header::read(ImageFormat::Png, bytes)?;
    match png_chunks::text(bytes, keyword, MAX_TEXT) {
        // It may have been behind the pixels.
        None if !png_chunks::is_complete(bytes) => Err("the file ends too early".into()),
        found => Ok(found),
    }
}

impl Error {
    /// Replaces the file name in errors about a file's bytes; other errors are returned unchanged.
    pub fn named(mut self, file: &str) -> Error {
        match &mut self {
            Error::NotAnImage { name, .. }
            | Error::Damaged { name, .. }
            | Error::Text { name }
            | Error::TooLarge { name, .. }
            | Error::FileTooLarge { name, .. } => file.clone_into(name),
            _ => {}
        }
        self
    }
}

fn jpeg_recipe(bytes: &[u8]) -> FoundText {
    let comments = jpeg::segments(bytes).filter(|segment| segment.marker == jpeg::COMMENT);
    let mut parts = comments.filter_map(|comment| comment.data.strip_prefix(COMMENT_TAG)).peekable();
    parts.peek()?;
    let mut text = Vec::new();
    for part in parts {
        if text.len() + part.len() > MAX_TEXT {
            return Some(None);
        }
        text.extend(part);
    }
    Some(String::from_utf8(text).ok())
}

fn webp_recipe(bytes: &[u8]) -> FoundText {
    exif::read(webp::exif(bytes)?, KEYWORD).map(Some)
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
    fn a_recipe_of_more_than_a_mebibyte_is_not_read() {
        let image = crate::RgbImage::black(1, 1);
        for format in [crate::Format::Png, crate::Format::Jpeg, crate::Format::Webp] {
            for (length, is_read) in [(1 << 20, true), ((1 << 20) + 1, false), (3 << 20, false)] {
                let file = crate::encode(&image, format, Some(&"a".repeat(length))).unwrap();
                let read = read_recipe(&file).map_err(|error| error.named("a.png").to_string());
                let expected = "image `a.png` holds a text that is damaged or longer than 1 MiB";
                assert_eq!(
                    read.as_ref().map(|text| text.as_ref().unwrap().len()).ok(),
                    is_read.then_some(length)
                );
                assert!(is_read || read.unwrap_err() == expected, "{format:?}");
            }
        }
    }

    #[test]
    fn an_error_can_be_given_the_name_of_the_file() {
        let named = |bytes| read_recipe(bytes).unwrap_err().named("a.png").to_string();
        assert!(named(b"<html>").starts_with("`a.png` is not an image"));
        assert!(named(b"\x89PNG\r\n\x1a\n").starts_with("image `a.png` is damaged"));
    }
}

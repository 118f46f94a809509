//! What the headers of an image file say about the work of decoding it: its size, and the memory that it takes at most.
//!
//! Nothing is inflated here, and nothing is allocated by what a file claims: this is asked before memory is reserved. The
//! decoders allocate more than the pixels, for what lies beside them: an animation's frame that is larger than the image,
//! a TIFF's lists of strips, a JPEG inside a TIFF, the Huffman codes of a lossless WebP.

mod gif;
mod memory;
mod tiff;
mod vp8l;
mod webp;

use image::ImageFormat;

use crate::{jpeg, png_chunks};
pub(crate) use memory::Header;
use memory::{truncated, twice_and_rgb};

impl Header {
    /// Reads the headers of a file; an error says what is wrong with them.
    pub(crate) fn read(format: ImageFormat, bytes: &[u8]) -> Result<Header, String> {
        let header = match format {
            ImageFormat::Png => png(bytes),
            ImageFormat::Jpeg => jpeg(bytes),
            ImageFormat::Gif => gif::header(bytes),
            ImageFormat::Bmp => bmp(bytes),
            ImageFormat::Tiff => tiff::header(bytes),
            ImageFormat::WebP => webp::header(bytes),
            _ => Err("an unknown format".into()),
        }?;
        if header.width == 0 || header.height == 0 {
            return Err("it has no pixels".into());
        }
        Ok(Header { file: bytes.len() as u64, ..header })
    }
}

fn png(bytes: &[u8]) -> Result<Header, String> {
    let first = png_chunks::chunks(bytes).next().filter(|chunk| chunk.kind == *b"IHDR");
    let data = first.and_then(|chunk| chunk.data.first_chunk::<13>()).ok_or("its header is missing")?;
    let side = |at: usize| u32::from_be_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
    let (depth, color) = (data[8], data[9]);
    // With transparency, which another chunk may add.
    let channels = if matches!(color, 0 | 4) { 2 } else { 4 };
    let pixel_bytes = twice_and_rgb(channels * if depth == 16 { 2 } else { 1 });
    Ok(Header { width: side(0), height: side(4), pixel_bytes, ..Header::default() })
}

fn jpeg(bytes: &[u8]) -> Result<Header, String> {
    // A hostile file has several.
    let frames = jpeg::frames(bytes).map(|frame| {
        // The coefficients of a progressive image have two bytes, of four components in CMYK.
        let pixel_bytes = if frame.components == 1 { 7 } else { 12 };
        Header { width: frame.width.into(), height: frame.height.into(), pixel_bytes, ..Header::default() }
    });
    frames.max_by_key(Header::memory).ok_or_else(|| "its header is missing".into())
}

fn bmp(bytes: &[u8]) -> Result<Header, String> {
    let u32_at = |at: usize| bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    let u16_at = |at: usize| bytes.get(at..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes));
    let size = match u32_at(14).ok_or_else(truncated)? {
        12 => u16_at(18).zip(u16_at(20)).map(|(width, height)| (width.into(), height.into())),
        // A negative height has the rows from top to bottom.
        _ => u32_at(18).zip(u32_at(22)).map(|(width, height)| (width, height.cast_signed().unsigned_abs())),
    };
    let (width, height) = size.ok_or_else(truncated)?;
    Ok(Header { width, height, pixel_bytes: twice_and_rgb(4), ..Header::default() })
}

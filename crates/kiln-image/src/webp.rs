//! WebP files: lossy by libwebp, and the chunks that carry EXIF and XMP.

use crate::{RgbImage, webp_strips};

/// Longest side of a WebP image, in pixels.
pub(crate) const MAX_SIDE: u32 = 16383;
/// Longest side of a lossless file.
pub(crate) const MAX_LOSSLESS_SIDE: u32 = 16384;
/// Flags of the `VP8X` chunk: there is such a chunk.
const HAS_EXIF: u8 = 0x08;
const HAS_XMP: u8 = 0x04;

/// Encodes an image without loss, or with a quality from 0 to 100.
pub(crate) fn encode(
    image: &RgbImage,
    quality: Option<u8>,
    exif: Option<Vec<u8>>,
    xmp: Option<String>,
) -> Result<Vec<u8>, String> {
    let file = match quality {
        None => lossless(image),
        Some(quality) => lossy(image, quality)?,
    };
    let (exif, xmp) = (exif.as_deref(), xmp.as_deref().map(str::as_bytes));
    if exif.is_none() && xmp.is_none() {
        return Ok(file);
    }
    extended(&file, image.width(), image.height(), exif, xmp)
        .ok_or_else(|| "libwebp's file is damaged".into())
}

fn lossless(image: &RgbImage) -> Vec<u8> {
    let mut chunks = b"WEBP".to_vec();
    chunk(&mut chunks, b"VP8L", &webp_strips::encode(image));
    let mut out = Vec::new();
    chunk(&mut out, b"RIFF", &chunks);
    out
}

/// Effort from 0 to 6. At the same error, libwebp's default of 4 takes twice as long for a file that is 0 to 3 % smaller.
const METHOD: i32 = 2;

fn lossy(image: &RgbImage, quality: u8) -> Result<Vec<u8>, String> {
    let encoder = webp::Encoder::from_rgb(image.pixels(), image.width(), image.height());
    let mut config = webp::WebPConfig::new().map_err(|()| "libwebp has another version")?;
    (config.quality, config.method) = (f32::from(quality.min(100)), METHOD);
    let file = encoder.encode_advanced(&config);
    Ok(file.map_err(|error| format!("libwebp failed: {error:?}"))?.to_vec())
}

/// Wraps the bitstream of a simple file (`RIFF`, size, `WEBP`, one chunk) into an extended one with EXIF and XMP.
fn extended(
    file: &[u8],
    width: u32,
    height: u32,
    exif: Option<&[u8]>,
    xmp: Option<&[u8]>,
) -> Option<Vec<u8>> {
    let bitstream = file.get(12..)?;
    let metadata = [(HAS_EXIF, b"EXIF", exif), (HAS_XMP, b"XMP ", xmp)];
    let present = || metadata.iter().filter_map(|(flag, name, data)| Some((flag, name, (*data)?)));
    let mut features = vec![present().map(|(flag, ..)| flag).sum(), 0, 0, 0];
    for side in [width, height] {
        features.extend(&(side - 1).to_le_bytes()[..3]);
    }
    let mut chunks = b"WEBP".to_vec();
    chunk(&mut chunks, b"VP8X", &features);
    chunks.extend(bitstream);
    present().for_each(|(_, name, data)| chunk(&mut chunks, name, data));
    let mut out = Vec::new();
    chunk(&mut out, b"RIFF", &chunks);
    Some(out)
}

/// A chunk of a file, without data if the file ends before it does.
pub(crate) struct Chunk<'a> {
    pub name: [u8; 4],
    pub data: Option<&'a [u8]>,
}

/// Iterates over chunks, to the end of the bytes or the first chunk that is not there as a whole.
pub(crate) fn chunks(bytes: &[u8]) -> impl Iterator<Item = Chunk<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (name, after) = rest.split_first_chunk::<4>()?;
        let (length, after) = after.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let data = after.get(..length);
        rest = after.get(length + length % 2..).unwrap_or_default();
        Some(Chunk { name: *name, data })
    })
}

/// The EXIF block of a file.
pub(crate) fn exif(file: &[u8]) -> Option<&[u8]> {
    data_of(file, b"EXIF")
}

/// The XMP packet of a file.
pub(crate) fn xmp(file: &[u8]) -> Option<&[u8]> {
    data_of(file, b"XMP ")
}

pub(crate) fn data_of<'a>(file: &'a [u8], name: &[u8; 4]) -> Option<&'a [u8]> {
    chunks(file.get(12..)?).find(|chunk| &chunk.name == name)?.data
}

/// Appends a chunk: its name, its length, its data, and a byte if the length is odd.
pub(crate) fn chunk(out: &mut Vec<u8>, name: &[u8; 4], data: &[u8]) {
    out.extend(name);
    out.extend((data.len() as u32).to_le_bytes());
    out.extend(data);
    if data.len() % 2 == 1 {
        out.push(0);
    }
}

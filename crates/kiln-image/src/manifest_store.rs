//! Where files hold C2PA's manifest store, the signed statement of their origin: a `caBX` chunk of PNG, APP11 segments of
//! JPEG, the last chunk of WebP. What it says is the business of `kiln-credentials`.

use std::ops::Range;

use image::ImageFormat;

use crate::decode::sniff;
use crate::{Error, Result, jpeg, png_chunks, webp};

/// Most bytes of a store that are read.
const MAX_STORE: usize = 64 << 20;
const PNG_CHUNK: &[u8; 4] = b"caBX";
const WEBP_CHUNK: &[u8; 4] = b"C2PA";
/// Segments of boxes, and their start: an identifier and a number for all segments of a box.
const APP11: u8 = 0xeb;
const JPEG_BOX: [u8; 4] = [b'J', b'P', 0, 1];
/// Length and type of the box, which every segment repeats.
const BOX_HEADER: usize = 8;
/// What a chunk or a segment has besides its part of the store.
const PNG_FRAME: usize = 12;
const WEBP_FRAME: usize = 8;
const JPEG_FRAME: usize = 4 + JPEG_BOX.len() + 4 + BOX_HEADER;
/// Where a WebP file tells how many bytes follow.
const RIFF_LENGTH: usize = 4;
/// Most bytes of a store in one segment.
const MAX_SEGMENT: usize = 65_000;

/// Adds a store to a PNG, JPEG or WebP file without one. Also returns where it lies, with all that frames it.
pub fn with_manifest_store(file: &[u8], store: &[u8]) -> Result<(Vec<u8>, Range<usize>)> {
    let place = ManifestPlace::new(file, store.len())?;
    Ok((place.fill(store), place.range()))
}

/// Where a store will lie in a PNG, JPEG or WebP file that has none.
#[derive(Debug)]
pub struct ManifestPlace<'a> {
    file: &'a [u8],
    format: ImageFormat,
    range: Range<usize>,
    /// Where the file tells its length, and what that will be.
    length: Option<(usize, [u8; 4])>,
}

impl<'a> ManifestPlace<'a> {
    /// Finds the place of a store of so many bytes. A WebP file takes stores of even length alone, as validators expect.
    pub fn new(file: &'a [u8], length: usize) -> Result<ManifestPlace<'a>> {
        let (format, format_name) = sniff("<bytes>", file)?;
        let damaged = |reason: &str| Error::Damaged {
            name: "<bytes>".into(),
            format: format_name,
            reason: reason.into(),
        };
        let at = match format {
            ImageFormat::Png => png_chunks::header_end(file).ok_or_else(|| damaged("it has no header"))?,
            ImageFormat::Jpeg => jpeg::header_end(file),
            ImageFormat::WebP => file.len(),
            _ => return Err(damaged("only PNG, JPEG and WebP files take credentials")),
        };
        let range = at..at + framed_length(format, length);
        let riff = (RIFF_LENGTH, ((range.end - RIFF_LENGTH - 4) as u32).to_le_bytes());
        Ok(ManifestPlace { file, format, range, length: (format == ImageFormat::WebP).then_some(riff) })
    }

    /// The bytes that the store will take with all that frames it: what a hash of the file has to leave out.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// All other bytes, as they will be, in pieces.
    pub fn rest(&self) -> impl Iterator<Item = &[u8]> {
        let [start, changed, end] = match &self.length {
            Some((at, length)) => [&self.file[..*at], &length[..], &self.file[at + length.len()..]],
            None => [self.file, &[], &[]],
        };
        [start, changed, end].into_iter()
    }

    /// Puts a store of this length there.
    pub fn fill(&self, store: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.file.len() + self.range.len());
        out.extend(&self.file[..self.range.start]);
        out.extend(framed(self.format, store));
        out.extend(&self.file[self.range.start..]);
        if let Some((at, length)) = &self.length {
            out[*at..at + length.len()].copy_from_slice(length);
        }
        out
    }
}

/// A store with what frames it in files of a format.
fn framed(format: ImageFormat, store: &[u8]) -> Vec<u8> {
    match format {
        ImageFormat::Png => png_chunks::chunk(PNG_CHUNK, store),
        ImageFormat::Jpeg => app11(store),
        _ => {
            let mut framed = Vec::new();
            webp::chunk(&mut framed, WEBP_CHUNK, store);
            framed
        }
    }
}

/// Returns the store of a file, of any program; `None` if it has none or it is not there as a whole.
pub fn read_manifest_store(bytes: &[u8]) -> Result<Option<Vec<u8>>> {
    let (format, _) = sniff("<bytes>", bytes)?;
    let store = match format {
        ImageFormat::Png => {
            png_chunks::chunks(bytes).find(|chunk| &chunk.kind == PNG_CHUNK).map(|chunk| chunk.data.to_vec())
        }
        ImageFormat::Jpeg => joined(bytes),
        ImageFormat::WebP => webp::data_of(bytes, WEBP_CHUNK).map(<[u8]>::to_vec),
        _ => None,
    };
    Ok(store.filter(|store| !store.is_empty() && store.len() <= MAX_STORE))
}

/// The length of a store with what frames it.
fn framed_length(format: ImageFormat, length: usize) -> usize {
    match format {
        ImageFormat::Png => length + PNG_FRAME,
        ImageFormat::Jpeg => {
            let content = length - BOX_HEADER.min(length);
            content + content.div_ceil(MAX_SEGMENT - BOX_HEADER) * JPEG_FRAME
        }
        _ => length + length % 2 + WEBP_FRAME,
    }
}

/// The segments of a store: each has the box's number, its own, and the header of the box.
fn app11(store: &[u8]) -> Vec<u8> {
    let (header, content) = store.split_at(BOX_HEADER.min(store.len()));
    let mut out = Vec::new();
    for (i, part) in content.chunks(MAX_SEGMENT - BOX_HEADER).enumerate() {
        let number = (i as u32 + 1).to_be_bytes();
        jpeg::segment(&mut out, APP11, &[&JPEG_BOX, &number, header, part].concat());
    }
    out
}

/// The box that the segments of a file hold.
fn joined(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut store: Vec<u8> = Vec::new();
    let mut number = None;
    for segment in jpeg::segments(bytes).filter(|segment| segment.marker == APP11) {
        let Some((start, rest)) = segment.data.split_first_chunk::<8>() else { continue };
        let Some((header, part)) = rest.split_at_checked(BOX_HEADER) else { continue };
        // Other boxes may be in such segments, too.
        if start[..2] != JPEG_BOX[..2] || *number.get_or_insert([start[2], start[3]]) != [start[2], start[3]]
        {
            continue;
        }
        if store.is_empty() {
            store.extend(header);
        }
        store.extend(part);
        if store.len() > MAX_STORE {
            return None;
        }
    }
    (!store.is_empty()).then_some(store)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Format, RgbImage, encode, from_bytes, read_recipe};

    fn store(length: usize) -> Vec<u8> {
        let mut store = (length as u32).to_be_bytes().to_vec();
        store.extend(b"jumb");
        store.extend((8..length).map(|at| (at * 7) as u8));
        store
    }

    #[test]
    fn stores_of_any_length_are_read_back_and_the_range_holds_nothing_else() {
        let image = RgbImage::new(3, 2, (0..18).collect()).unwrap();
        for format in [Format::Png, Format::Jpeg, Format::Webp] {
            let file = encode(&image, format, Some("{}")).unwrap();
            assert_eq!(read_manifest_store(&file).unwrap(), None);
            for length in [16, 1000, 65_000, 65_001, 200_002] {
                let store = store(length);
                let (signed, range) = with_manifest_store(&file, &store).unwrap();
                assert_eq!(read_manifest_store(&signed).unwrap().as_deref(), Some(&store[..]), "{format:?}");
                assert_eq!(from_bytes("a", &signed).unwrap(), from_bytes("a", &file).unwrap());
                assert_eq!(read_recipe(&signed).unwrap().as_deref(), Some("{}"));
                let mut rest = [&signed[..range.start], &signed[range.end..]].concat();
                let place = ManifestPlace::new(&file, length).unwrap();
                assert_eq!(place.rest().collect::<Vec<_>>().concat(), rest, "{format:?}");
                if format == Format::Webp {
                    rest[4..8].copy_from_slice(&file[4..8]);
                }
                assert_eq!(rest, file);
            }
        }
    }

    #[test]
    fn a_store_that_is_cut_off_is_none() {
        let image = RgbImage::black(1, 1);
        for format in [Format::Png, Format::Jpeg, Format::Webp] {
            let file = encode(&image, format, None).unwrap();
            let (signed, range) = with_manifest_store(&file, &store(100)).unwrap();
            let _ = read_manifest_store(&signed[..range.start + 30]);
        }
    }
}

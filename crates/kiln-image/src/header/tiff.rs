//! The first directory of a TIFF: the image's size, and what its decoder reads into memory beside the pixels.

use std::ops::Range;

use super::memory::{Header, truncated, twice_and_rgb};
use crate::jpeg;

const WIDTH: u16 = 256;
const HEIGHT: u16 = 257;
const BITS: u16 = 258;
const COMPRESSION: u16 = 259;
const SAMPLES: u16 = 277;
const TILE_WIDTH: u16 = 322;
const JPEG_TABLES: u16 = 347;
/// Offsets and lengths of strips, then of tiles.
const CHUNKS: [(u16, u16); 2] = [(273, 279), (324, 325)];
/// The tags whose values the decoder reads.
const READ: [u16; 20] = [
    WIDTH,
    HEIGHT,
    BITS,
    COMPRESSION,
    SAMPLES,
    TILE_WIDTH,
    JPEG_TABLES,
    262,
    273,
    274,
    278,
    279,
    284,
    317,
    323,
    324,
    325,
    338,
    339,
    530,
];
/// Memory for each value of a tag: the decoder keeps it as an enum, and as a number of eight bytes, twice.
const VALUE_BYTES: u64 = 32 + 2 * 8;

pub(super) fn header(bytes: &[u8]) -> Result<Header, String> {
    let directory = Directory::read(bytes).ok_or_else(truncated)?;
    let number = |tag: u16| directory.first(tag);
    let width = number(WIDTH).and_then(|side| u32::try_from(side).ok()).ok_or("its width is missing")?;
    let height = number(HEIGHT).and_then(|side| u32::try_from(side).ok()).ok_or("its height is missing")?;
    let (samples, bits) = (number(SAMPLES).unwrap_or(1), number(BITS).unwrap_or(1));
    let stored = samples.saturating_mul(bits.div_ceil(8));
    // A tile may be much wider than the image.
    let row = u64::from(width).max(number(TILE_WIDTH).unwrap_or(0)).saturating_mul(stored);
    let mut extra = row.saturating_mul(2);
    for entry in directory.entries().filter(|entry| READ.contains(&entry.tag)) {
        if directory.place(&entry).is_none() {
            return Err(format!("the values of its tag {} lie outside of the file", entry.tag));
        }
        extra = extra.saturating_add(entry.count.saturating_mul(VALUE_BYTES));
    }
    if matches!(number(COMPRESSION), Some(6 | 7)) {
        extra = extra.saturating_add(directory.jpeg_bytes()?);
    }
    Ok(Header { width, height, pixel_bytes: twice_and_rgb(stored), extra, file: 0 })
}

/// The first directory of a file.
struct Directory<'a> {
    bytes: &'a [u8],
    big_endian: bool,
    at: usize,
    count: usize,
}

/// A tag with its values.
struct Entry {
    tag: u16,
    kind: u16,
    count: u64,
    /// Where the values, or the offset of the values, are.
    at: usize,
}

impl Entry {
    fn value_size(&self) -> Option<usize> {
        match self.kind {
            1 | 2 | 6 | 7 => Some(1),
            3 | 8 => Some(2),
            4 | 9 | 11 | 13 => Some(4),
            5 | 10 | 12 | 16..=18 => Some(8),
            _ => None,
        }
    }
}

impl<'a> Directory<'a> {
    fn read(bytes: &'a [u8]) -> Option<Directory<'a>> {
        let big_endian = bytes.first()? == &b'M';
        let mut directory = Directory { bytes, big_endian, at: 0, count: 0 };
        directory.at = usize::try_from(directory.number(4, 4)?).ok()?;
        directory.count = usize::try_from(directory.number(directory.at, 2)?).ok()?;
        Some(directory)
    }

    fn number(&self, at: usize, size: usize) -> Option<u64> {
        let bytes = self.bytes.get(at..at.checked_add(size)?)?;
        let add = |sum: u64, byte: &u8| sum << 8 | u64::from(*byte);
        Some(if self.big_endian { bytes.iter().fold(0, add) } else { bytes.iter().rev().fold(0, add) })
    }

    fn entries(&self) -> impl Iterator<Item = Entry> {
        (0..self.count).map_while(|index| {
            let at = self.at.checked_add(2 + 12 * index)?;
            Some(Entry {
                tag: self.number(at, 2)? as u16,
                kind: self.number(at + 2, 2)? as u16,
                count: self.number(at + 4, 4)?,
                at: at + 8,
            })
        })
    }

    /// Where a tag's values are; `None` if the file does not hold them.
    fn place(&self, entry: &Entry) -> Option<Range<usize>> {
        // The decoder refuses an unknown type.
        let Some(size) = entry.value_size() else { return Some(0..0) };
        let length = size.checked_mul(usize::try_from(entry.count).ok()?)?;
        let at = if length <= 4 { entry.at } else { usize::try_from(self.number(entry.at, 4)?).ok()? };
        let end = at.checked_add(length)?;
        (end <= self.bytes.len()).then_some(at..end)
    }

    fn values(&self, tag: u16) -> impl Iterator<Item = u64> {
        let entry = self.entries().find(|entry| entry.tag == tag);
        let found = entry.and_then(|entry| Some((self.place(&entry)?, entry.value_size()?)));
        let (place, size) = found.unwrap_or((0..0, 1));
        place.step_by(size).filter_map(move |at| self.number(at, size))
    }

    fn first(&self, tag: u16) -> Option<u64> {
        self.values(tag).next()
    }

    /// Memory for the largest JPEG among the strips or tiles, whose size need not be that of a strip.
    fn jpeg_bytes(&self) -> Result<u64, String> {
        let pixels = |bytes: &[u8]| {
            let frames = jpeg::frames(bytes).map(|frame| u64::from(frame.width) * u64::from(frame.height));
            frames.max().unwrap_or(0)
        };
        let entry = self.entries().find(|entry| entry.tag == JPEG_TABLES);
        let tables = entry.and_then(|entry| self.place(&entry)).unwrap_or_default();
        let (mut largest, mut read) = (pixels(&self.bytes[tables]), 0);
        for (offsets, lengths) in CHUNKS {
            for (offset, length) in self.values(offsets).zip(self.values(lengths)) {
                read += length;
                if read > 2 * self.bytes.len() as u64 {
                    return Err("its strips overlap".into());
                }
                let start = usize::try_from(offset).ok().filter(|start| *start <= self.bytes.len());
                let rest = &self.bytes[start.ok_or_else(truncated)?..];
                let chunk = &rest[..rest.len().min(usize::try_from(length).unwrap_or(usize::MAX))];
                largest = largest.max(pixels(chunk));
            }
        }
        // Four components of one byte, and their coefficients of two.
        Ok(largest.saturating_mul(12))
    }
}

//! Parallel JPEG encoding: strips of blocks between restart markers, which need nothing of each other.
//!
//! Baseline, full colour resolution, the tables of the standard's Annex K scaled as libjpeg scales them. The bytes do not
//! depend on the number of threads.

use rayon::prelude::*;

use crate::RgbImage;
use crate::jpeg_blocks::{BlockRow, Quantizer, ZIGZAG};
use crate::jpeg_codes::{BitWriter, CHROMA_AC, CHROMA_DC, CodeTable, LUMA_AC, LUMA_DC};

/// Smallest number of blocks of a component in a strip: a restart marker costs some six bytes.
const STRIP_BLOCKS: usize = 512;
/// Number of restart markers, which count from 0 again after the last.
const RESTARTS: usize = 8;

const LUMA: [u8; 64] = [
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17,
    22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78,
    87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
];
const CHROMA: [u8; 64] = [
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66,
    99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99,
];

/// Encodes an image with a quality from 1 to 100. Its sides must fit into 16 bits.
pub(crate) fn encode(image: &RgbImage, quality: u8) -> Vec<u8> {
    let blocks = (image.width() as usize).div_ceil(8);
    let rows = (image.height() as usize).div_ceil(8);
    let rows_per_strip = STRIP_BLOCKS.div_ceil(blocks).min(rows);
    let divisors = [LUMA, CHROMA].map(|table| scaled(table, quality));
    let quantizers = [&divisors[0], &divisors[1]].map(Quantizer::new);
    let codes = Codes::new();
    let strips: Vec<Vec<u8>> = (0..rows.div_ceil(rows_per_strip))
        .into_par_iter()
        .map(|strip| {
            let end = ((strip + 1) * rows_per_strip).min(rows);
            encode_rows(image, strip * rows_per_strip..end, &quantizers, &codes)
        })
        .collect();
    let interval = (strips.len() > 1).then_some(rows_per_strip * blocks);
    let mut out = header(image, &divisors, interval);
    out.reserve(strips.iter().map(|strip| strip.len() + 2).sum());
    for (index, strip) in strips.iter().enumerate() {
        if index > 0 {
            out.extend([0xff, 0xd0 + ((index - 1) % RESTARTS) as u8]);
        }
        out.extend(strip);
    }
    out.extend([0xff, 0xd9]);
    out
}

/// A quantization table of the standard, scaled for a quality as libjpeg does.
fn scaled(table: [u8; 64], quality: u8) -> [u8; 64] {
    let quality = u32::from(quality.clamp(1, 100));
    let percent = if quality < 50 { 5000 / quality } else { 200 - 2 * quality };
    table.map(|value| ((u32::from(value) * percent + 50) / 100).clamp(1, 255) as u8)
}

/// The codes of luma and of both chromas.
struct Codes {
    dc: [CodeTable; 2],
    ac: [CodeTable; 2],
}

impl Codes {
    fn new() -> Codes {
        Codes { dc: [LUMA_DC.codes(), CHROMA_DC.codes()], ac: [LUMA_AC.codes(), CHROMA_AC.codes()] }
    }
}

/// Encodes rows of blocks as one interval.
fn encode_rows(
    image: &RgbImage,
    rows: std::ops::Range<usize>,
    quantizers: &[Quantizer; 2],
    codes: &Codes,
) -> Vec<u8> {
    let mut out = BitWriter::default();
    let mut previous = [0; 3];
    let mut row = BlockRow::new(image.width() as usize);
    for y in rows {
        row.load(image, 8 * y);
        for x in 0..row.blocks() {
            for (component, previous) in previous.iter_mut().enumerate() {
                let kind = component.min(1);
                let block = quantizers[kind].quantize(&row.transform(component, x));
                out.put_block(&block, *previous, &codes.dc[kind], &codes.ac[kind]);
                *previous = block[0];
            }
        }
    }
    out.finish()
}

/// Everything before the compressed data.
fn header(image: &RgbImage, divisors: &[[u8; 64]; 2], interval: Option<usize>) -> Vec<u8> {
    let mut out = vec![0xff, 0xd8];
    // Version 1.2, square pixels, no thumbnail.
    segment(&mut out, 0xe0, b"JFIF\0\x01\x02\0\0\x01\0\x01\0\0");
    let [height, width] = [image.height(), image.width()].map(|side| (side as u16).to_be_bytes());
    // Each component: its number, its sampling factors, its quantization table.
    let components = [1, 0x11, 0, 2, 0x11, 1, 3, 0x11, 1];
    segment(&mut out, 0xc0, &[&[8], &height[..], &width, &[3], &components].concat());
    for (index, table) in divisors.iter().enumerate() {
        let in_order = ZIGZAG.map(|at| table[usize::from(at)]);
        segment(&mut out, 0xdb, &[&[index as u8], &in_order[..]].concat());
    }
    for (class_and_index, code) in
        [(0x00, &LUMA_DC), (0x10, &LUMA_AC), (0x01, &CHROMA_DC), (0x11, &CHROMA_AC)]
    {
        segment(&mut out, 0xc4, &[&[class_and_index], &code.counts[..], code.values].concat());
    }
    if let Some(blocks) = interval {
        segment(&mut out, 0xdd, &(blocks as u16).to_be_bytes());
    }
    segment(&mut out, 0xda, &[3, 1, 0x00, 2, 0x11, 3, 0x11, 0, 63, 0]);
    out
}

fn segment(out: &mut Vec<u8>, marker: u8, data: &[u8]) {
    out.extend([0xff, marker]);
    out.extend((data.len() as u16 + 2).to_be_bytes());
    out.extend(data);
}

//! Parallel lossless WebP: strips of rows are predicted and coded independently, each with Huffman codes of its own.
//!
//! As in `png_strips`, the only matches worth finding are repeated pixels. The bytes do not depend on the number of threads.

use rayon::prelude::*;

use crate::RgbImage;
use crate::bits::BitWriter;
use crate::huffman::{self, MAX_CODE_BITS};
use crate::webp_predict::{self, Predictor, TILE_BITS};

/// Pixels per strip, approximately: large enough for its own codes to pay off, small enough to occupy every core.
const STRIP_PIXELS: usize = 64 << 10;
/// Largest height of a tile of the image that tells which codes are used where, as a power of two.
const MAX_GROUP_BITS: u32 = 9;
/// Symbols of the green channel: values and lengths of runs.
const GREENS: usize = 256 + 24;
/// Longest run of a pixel.
const MAX_RUN: usize = 4096;
/// Distance symbol of the pixel before.
const PIXEL_BEFORE: u64 = 1;
const BYTES_PER_PIXEL: usize = 3;

/// Returns the content of a `VP8L` chunk.
pub(crate) fn encode(image: &RgbImage) -> Vec<u8> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let layout = Layout::new(width, height);
    let strips: Vec<Strip> =
        (0..layout.strips).into_par_iter().map(|strip| Strip::new(image, layout.rows(strip))).collect();
    let mut out = BitWriter::with_capacity(strips.iter().map(|s| s.codes.len() + s.pixels.len() + 16).sum());
    out.put(0x2f, 8);
    out.put(width as u64 - 1, 14);
    out.put(height as u64 - 1, 14);
    // No alpha, version 0.
    out.put(0, 4);
    // The predictor transform, then "subtract green": green is subtracted from residuals, which don't wrap around.
    out.put(0b001, 3);
    out.put(u64::from(TILE_BITS) - 2, 3);
    let predictors = strips.iter().flat_map(|strip| &strip.predictors);
    put_small_image(&mut out, predictors.map(|&predictor| [0, predictor as u8, 0]));
    out.put(0b101, 3);
    // No further transform, no colour cache.
    out.put(0, 2);
    out.put(u64::from(layout.strips > 1), 1);
    if layout.strips > 1 {
        out.put(u64::from(layout.group_bits) - 2, 3);
        put_small_image(&mut out, layout.groups());
    }
    strips.iter().for_each(|strip| out.append(&strip.codes));
    strips.iter().for_each(|strip| out.append(&strip.pixels));
    out.finish()
}

/// How an image is cut: the tiles of each strip have one group of codes.
struct Layout {
    width: usize,
    height: usize,
    group_bits: u32,
    rows_per_strip: usize,
    strips: usize,
}

impl Layout {
    fn new(width: usize, height: usize) -> Layout {
        let rows = (STRIP_PIXELS / width).max(1);
        let group_bits = rows.ilog2().clamp(TILE_BITS, MAX_GROUP_BITS);
        // Narrow images have strips of several tiles.
        let rows_per_strip = (rows >> group_bits).max(1) << group_bits;
        Layout { width, height, group_bits, rows_per_strip, strips: height.div_ceil(rows_per_strip) }
    }

    fn rows(&self, strip: usize) -> std::ops::Range<usize> {
        let start = strip * self.rows_per_strip;
        start..(start + self.rows_per_strip).min(self.height)
    }

    /// The image of each tile's group: its number in green and red.
    fn groups(&self) -> impl Iterator<Item = [u8; 3]> + Clone {
        let columns = self.width.div_ceil(1 << self.group_bits);
        let tiles_per_strip = self.rows_per_strip >> self.group_bits;
        (0..self.height.div_ceil(1 << self.group_bits)).flat_map(move |row| {
            let [low, high, ..] = (row / tiles_per_strip).to_le_bytes();
            std::iter::repeat_n([high, low, 0], columns)
        })
    }
}

/// A coded strip.
struct Strip {
    predictors: Vec<Predictor>,
    codes: BitWriter,
    pixels: BitWriter,
}

impl Strip {
    fn new(image: &RgbImage, rows: std::ops::Range<usize>) -> Strip {
        let stride = BYTES_PER_PIXEL * image.width() as usize;
        let webp_predict::Predicted { mut residuals, predictors } =
            webp_predict::predict(image.pixels(), stride, rows);
        let (pixels, _) = residuals.as_chunks_mut::<BYTES_PER_PIXEL>();
        for [red, green, blue] in &mut *pixels {
            *red = red.wrapping_sub(*green);
            *blue = blue.wrapping_sub(*green);
        }
        let group = Group::new(pixels);
        let mut codes = BitWriter::with_capacity(0);
        group.put(&mut codes);
        let mut out = BitWriter::with_capacity(group.bits / 8);
        group.put_pixels(pixels, &mut out);
        Strip { predictors, codes, pixels: out }
    }
}

/// Writes an image without transforms and with one group of codes.
fn put_small_image(out: &mut BitWriter, pixels: impl Iterator<Item = [u8; 3]>) {
    let pixels: Vec<[u8; 3]> = pixels.collect();
    let group = Group::new(&pixels);
    // No colour cache.
    out.put(0, 1);
    group.put(out);
    out.reserve(group.bits / 8 + 1);
    group.put_pixels(&pixels, out);
}

/// Huffman codes of the three channels.
struct Group {
    green: Code,
    red: Code,
    blue: Code,
    /// What the pixels take.
    bits: usize,
}

impl Group {
    fn new(pixels: &[[u8; 3]]) -> Group {
        let mut greens = [0u32; GREENS];
        let (mut reds, mut blues) = ([0u32; 256], [0u32; 256]);
        let mut extra = 0;
        for_each_run(pixels, |literals, repeats| {
            for &[red, green, blue] in literals {
                reds[usize::from(red)] += 1;
                greens[usize::from(green)] += 1;
                blues[usize::from(blue)] += 1;
            }
            for run in runs(repeats) {
                greens[run.symbol] += 1;
                extra += run.extra_bits as usize;
            }
        });
        let [green, red, blue] = [Code::new(&greens), Code::new(&reds), Code::new(&blues)];
        let bits = extra + green.bits(&greens) + red.bits(&reds) + blue.bits(&blues);
        Group { green, red, blue, bits }
    }

    fn put(&self, out: &mut BitWriter) {
        self.green.put(out);
        self.red.put(out);
        self.blue.put(out);
        put_single(out, 0);
        put_single(out, PIXEL_BEFORE);
    }

    fn put_pixels(&self, pixels: &[[u8; 3]], out: &mut BitWriter) {
        const { assert!(3 * MAX_CODE_BITS <= 56) };
        let (greens, reds, blues) = (&self.green.table, &self.red.table, &self.blue.table);
        for_each_run(pixels, |literals, repeats| {
            for &[red, green, blue] in literals {
                let [green, red, blue] =
                    [greens[usize::from(green)], reds[usize::from(red)], blues[usize::from(blue)]];
                let bits = green.0 | red.0 << green.1 | blue.0 << (green.1 + red.1);
                out.put(bits, green.1 + red.1 + blue.1);
            }
            for run in runs(repeats) {
                out.put(greens[run.symbol].0, greens[run.symbol].1);
                out.put(run.extra, run.extra_bits);
            }
        });
    }
}

/// Splits pixels into literals, each followed by a number of repeats of the last one. Short runs count as literals.
#[inline(always)]
fn for_each_run(pixels: &[[u8; 3]], mut run: impl FnMut(&[[u8; 3]], usize)) {
    const STEP: usize = 4;
    let repeats =
        |at: usize| pixels.get(at..at + STEP).is_some_and(|four| four == &pixels[at - 1..at + STEP - 1]);
    let (mut start, mut at) = (0, 1);
    while at + STEP <= pixels.len() {
        if !repeats(at) {
            at += STEP;
            continue;
        }
        let pixel = pixels[at];
        let before = pixels[start..at].iter().rev().take_while(|&&other| other == pixel).count();
        // The first of them is a literal.
        let begin = at - before + 1;
        at += STEP;
        at += pixels[at..].iter().take_while(|&&other| other == pixel).count();
        run(&pixels[start..begin], at - begin);
        start = at;
    }
    run(&pixels[start..], 0);
}

/// A run in pieces that the format can encode.
fn runs(repeats: usize) -> impl Iterator<Item = RunCode> {
    (0..repeats).step_by(MAX_RUN).map(move |at| RunCode::new((repeats - at).min(MAX_RUN)))
}

/// The length of a run as the format encodes it.
struct RunCode {
    symbol: usize,
    extra: u64,
    extra_bits: u32,
}

impl RunCode {
    fn new(length: usize) -> RunCode {
        let before = length - 1;
        if before < 4 {
            return RunCode { symbol: 256 + before, extra: 0, extra_bits: 0 };
        }
        let extra_bits = before.ilog2() - 1;
        let symbol = 256 + 2 * before.ilog2() as usize + ((before >> extra_bits) & 1);
        RunCode { symbol, extra: before as u64 & ((1 << extra_bits) - 1), extra_bits }
    }
}

/// A Huffman code.
struct Code {
    /// Code and length in bits of each symbol.
    table: [(u64, u32); GREENS],
    symbols: usize,
    /// The symbol of a code that has only one, which takes no bits.
    single: Option<u64>,
}

impl Code {
    fn new(counts: &[u32]) -> Code {
        let mut used = (0..counts.len()).filter(|&symbol| counts[symbol] > 0);
        let (first, second) = (used.next(), used.next());
        let mut table = [(0, 0); GREENS];
        let single = if second.is_none() { Some(first.unwrap_or(0) as u64) } else { None };
        if single.is_none() {
            let lengths = huffman::code_lengths(counts, MAX_CODE_BITS);
            let codes = huffman::canonical_codes(&lengths);
            for (entry, (code, length)) in table.iter_mut().zip(codes.into_iter().zip(lengths)) {
                *entry = (code.into(), length.into());
            }
        }
        Code { table, symbols: counts.len(), single }
    }

    /// Bits of all symbols, without extra bits.
    fn bits(&self, counts: &[u32]) -> usize {
        counts.iter().zip(&self.table).map(|(count, (_, length))| *count as usize * *length as usize).sum()
    }

    /// Writes the code's lengths, which have a code of their own.
    fn put(&self, out: &mut BitWriter) {
        /// Longest code of a length.
        const MAX_LENGTH_BITS: usize = 7;
        /// Order in which the codes of lengths are written: repeat codes, which are not used, are 16 to 18.
        const ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        if let Some(symbol) = self.single {
            return put_single(out, symbol);
        }
        out.reserve(4 + ORDER.len() + self.symbols);
        let lengths = || self.table[..self.symbols].iter().map(|(_, length)| *length as usize);
        let mut counts = [0; ORDER.len()];
        lengths().for_each(|length| counts[length] += 1);
        let length_bits = huffman::code_lengths(&counts, MAX_LENGTH_BITS);
        let length_codes = huffman::canonical_codes(&length_bits);
        // Not a single symbol; all code lengths follow.
        out.put(0, 1);
        out.put(ORDER.len() as u64 - 4, 4);
        ORDER.iter().for_each(|&length| out.put(length_bits[length].into(), 3));
        out.put(0, 1);
        // A single length takes no bits, too.
        if counts.iter().filter(|&&count| count > 0).count() > 1 {
            lengths().for_each(|length| out.put(length_codes[length].into(), length_bits[length].into()));
        }
    }
}

/// Writes a code of a single symbol below 256.
fn put_single(out: &mut BitWriter, symbol: u64) {
    out.put(0b01, 2);
    if symbol < 2 {
        out.put(symbol << 1, 2);
    } else {
        out.put(symbol << 1 | 1, 9);
    }
}

//! How many Huffman codes a lossless WebP stream has: a file of a mebibyte can ask for a gibibyte of tables.
//!
//! The number is the largest value in an image that assigns codes to blocks of pixels. That image stands behind the
//! transforms, each with an image of its own, so all of them are read, but none is stored: which bits belong to a pixel does
//! not depend on the pixels before it, and copies repeat values that were seen.

use super::memory::truncated;

/// The alphabets of a group of codes: green with lengths, red, blue, alpha, distances.
const ALPHABETS: [usize; 5] = [280, 256, 256, 256, 40];
/// The order in which the lengths of the code for lengths are stored.
const LENGTH_ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
const MAX_LENGTH: usize = 15;
/// The decoder's table for short codes, and its tree's nodes for each symbol with a long one.
const TABLE_BYTES: u64 = 4 << 10;
const SYMBOL_BYTES: u64 = 2 * 16;

/// Memory for the Huffman codes of a stream. Without a `size` it is in the stream.
pub(super) fn table_bytes(stream: &[u8], size: Option<(u32, u32)>) -> Result<u64, String> {
    let mut bits = Bits { bytes: stream, at: 0 };
    let (width, height) = match size {
        Some(size) => size,
        None => {
            bits.take(8)?;
            let size = (bits.take(14)? + 1, bits.take(14)? + 1);
            bits.take(4)?;
            size
        }
    };
    let width = bits.skip_transforms(width, height)?;
    let cache = bits.color_cache()?;
    let mut groups = 1;
    if bits.take(1)? == 1 {
        let block = bits.take(3)? + 2;
        groups = bits.largest_value(blocks(width, block), blocks(height, block))? + 1;
    }
    let symbols = ALPHABETS.iter().sum::<usize>() + cache;
    let group = ALPHABETS.len() as u64 * TABLE_BYTES + symbols as u64 * SYMBOL_BYTES;
    Ok(u64::from(groups) * group)
}

fn blocks(side: u32, bits: u32) -> u32 {
    side.div_ceil(1 << bits)
}

/// Bits, from the lowest of each byte.
struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    fn bit(&mut self) -> Result<u32, String> {
        let byte = self.bytes.get(self.at / 8).ok_or_else(truncated)?;
        let bit = byte >> (self.at % 8) & 1;
        self.at += 1;
        Ok(bit.into())
    }

    fn take(&mut self, count: u32) -> Result<u32, String> {
        let mut value = 0;
        for place in 0..count {
            value |= self.bit()? << place;
        }
        Ok(value)
    }

    /// Reads the transforms; returns the width of the image that is stored.
    fn skip_transforms(&mut self, width: u32, height: u32) -> Result<u32, String> {
        let (mut stored, mut seen) = (width, [false; 4]);
        while self.bit()? == 1 {
            let kind = self.take(2)? as usize;
            if std::mem::replace(&mut seen[kind], true) {
                return Err("a transform occurs twice".into());
            }
            match kind {
                // Predictors and colours of blocks.
                0 | 1 => {
                    let block = self.take(3)? + 2;
                    self.largest_value(blocks(stored, block), blocks(height, block))?;
                }
                // A palette, of which several indices may share a pixel.
                3 => {
                    let colors = self.take(8)? + 1;
                    self.largest_value(colors, 1)?;
                    let packed = if colors <= 2 {
                        3
                    } else if colors <= 4 {
                        2
                    } else {
                        u32::from(colors <= 16)
                    };
                    stored = blocks(stored, packed);
                }
                _ => {}
            }
        }
        Ok(stored)
    }

    /// The number of colours in the cache, if there is one.
    fn color_cache(&mut self) -> Result<usize, String> {
        if self.bit()? == 0 {
            return Ok(0);
        }
        match self.take(4)? {
            bits @ 1..=11 => Ok(1 << bits),
            bits => Err(format!("its colour cache has {bits} bits")),
        }
    }

    /// Reads an image of numbers, in red and green; returns the largest.
    fn largest_value(&mut self, width: u32, height: u32) -> Result<u32, String> {
        let cache = self.color_cache()?;
        let mut codes = Vec::new();
        for (index, alphabet) in ALPHABETS.iter().enumerate() {
            codes.push(self.code(alphabet + if index == 0 { cache } else { 0 })?);
        }
        let [green, red, blue, alpha, distance] = &codes[..] else { return Err(truncated()) };
        let (mut left, mut largest) = (u64::from(width) * u64::from(height), 0);
        while left > 0 {
            match self.symbol(green)? {
                symbol @ 0..=255 => {
                    let red = self.symbol(red)?;
                    self.symbol(blue)?;
                    self.symbol(alpha)?;
                    largest = largest.max(red << 8 | symbol);
                    left -= 1;
                }
                symbol @ 256..=279 => {
                    let length = self.distance(symbol - 256)?;
                    let prefix = self.symbol(distance)?;
                    self.distance(prefix)?;
                    left = left.checked_sub(length).ok_or("a copy is too long")?;
                }
                // A colour of the cache.
                _ => left -= 1,
            }
        }
        Ok(largest)
    }

    /// A length or distance: a prefix, and bits behind it.
    fn distance(&mut self, prefix: u32) -> Result<u64, String> {
        if prefix < 4 {
            return Ok(u64::from(prefix) + 1);
        }
        let extra = (prefix - 2) >> 1;
        Ok(u64::from(((2 + (prefix & 1)) << extra) + self.take(extra)?) + 1)
    }

    fn code(&mut self, alphabet: usize) -> Result<Code, String> {
        if self.bit()? == 1 {
            // One or two symbols.
            let second = self.bit()? == 1;
            let wide = self.bit()?;
            let mut symbols = vec![self.take(1 + 7 * wide)?];
            if second {
                symbols.push(self.take(8)?);
            }
            return Ok(Code::simple(symbols));
        }
        let mut lengths = [0; LENGTH_ORDER.len()];
        for place in LENGTH_ORDER.iter().take(4 + self.take(4)? as usize) {
            lengths[*place] = self.take(3)? as u8;
        }
        let code = Code::new(&lengths)?;
        let mut stored = alphabet;
        if self.bit()? == 1 {
            let width = 2 + 2 * self.take(3)?;
            stored = 2 + self.take(width)? as usize;
        }
        let (mut lengths, mut previous) = (Vec::with_capacity(alphabet), 8);
        while lengths.len() < alphabet && stored > 0 {
            stored -= 1;
            let (length, count) = match self.symbol(&code)? {
                16 => (previous, 3 + self.take(2)?),
                17 => (0, 3 + self.take(3)?),
                18 => (0, 11 + self.take(7)?),
                length => (length as u8, 1),
            };
            previous = if length == 0 { previous } else { length };
            lengths.extend(std::iter::repeat_n(length, count as usize));
        }
        if lengths.len() > alphabet {
            return Err("a code has too many lengths".into());
        }
        Code::new(&lengths)
    }

    fn symbol(&mut self, code: &Code) -> Result<u32, String> {
        if let [only] = code.symbols[..] {
            return Ok(only);
        }
        let (mut value, mut first, mut index) = (0, 0, 0);
        for count in &code.counts[1..] {
            value |= self.bit()?;
            if value < first + count {
                return Ok(code.symbols[(index + value - first) as usize]);
            }
            (index, first) = (index + count, (first + count) << 1);
            value <<= 1;
        }
        Err("a code is incomplete".into())
    }
}

/// A canonical Huffman code: the symbols by length, and how many have each length.
struct Code {
    symbols: Vec<u32>,
    counts: [u32; MAX_LENGTH + 1],
}

impl Code {
    fn simple(symbols: Vec<u32>) -> Code {
        let mut counts = [0; MAX_LENGTH + 1];
        counts[1] = symbols.len() as u32;
        Code { symbols, counts }
    }

    fn new(lengths: &[u8]) -> Result<Code, String> {
        let mut counts = [0; MAX_LENGTH + 1];
        let mut symbols = Vec::new();
        for length in 1..=MAX_LENGTH {
            let of_length = lengths.iter().enumerate().filter(|(_, found)| usize::from(**found) == length);
            symbols.extend(of_length.map(|(symbol, _)| symbol as u32));
            counts[length] = symbols.len() as u32 - counts[..length].iter().sum::<u32>();
        }
        if symbols.is_empty() { Err("a code is empty".into()) } else { Ok(Code { symbols, counts }) }
    }
}

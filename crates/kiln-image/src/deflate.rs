//! A fast deflate encoder for filtered PNG rows, which compresses segments in parallel.
//!
//! Filtered rows hold small differences with few repeated strings. The only matches worth finding are runs of zeros, at
//! distance 1; the rest is left to Huffman codes, separate for each segment. Every segment but the last ends
//! on a byte boundary, with an empty stored block, so that segments can be concatenated.

use crate::bits::BitWriter;
use crate::huffman::{self, MAX_CODE_BITS};

const END_OF_BLOCK: usize = 256;
/// Literals, the end of block and match lengths.
const SYMBOLS: usize = 286;
/// Every match has distance 1, so the distance alphabet is a single code of one bit.
const DISTANCE_BITS: u8 = 1;
const MAX_MATCH: usize = 258;
/// The format's limit for a stored block.
const MAX_STORED: usize = 65535;

/// Compresses one segment of a stream. Concatenated segments form one deflate stream.
pub(crate) fn compress(data: &[u8], last: bool) -> Vec<u8> {
    let mut counts = [0; SYMBOLS];
    let mut literal_counts = [[0; 256]; 4];
    counts[END_OF_BLOCK] = 1;
    for_each_run(data, |literals, zeros| {
        count_bytes(&mut literal_counts, literals);
        split_zeros(zeros, |token| match token {
            ZeroToken::Literal => counts[0] += 1,
            ZeroToken::Match(length) => counts[length_code(length).symbol] += 1,
        });
    });
    for (byte, count) in counts[..256].iter_mut().enumerate() {
        *count += literal_counts.iter().map(|table| table[byte]).sum::<u32>();
    }
    let lengths = huffman::code_lengths(&counts, MAX_CODE_BITS);
    let mut bits = 8 * OVERHEAD_BYTES;
    for (symbol, &count) in counts.iter().enumerate() {
        let extra =
            symbol.checked_sub(END_OF_BLOCK + 1).map_or(0, |i| usize::from(EXTRA_BITS[i] + DISTANCE_BITS));
        bits += count as usize * (usize::from(lengths[symbol]) + extra);
    }
    let stored = data.len() + 5 * data.len().div_ceil(MAX_STORED);
    if bits / 8 >= stored { store(data, last) } else { encode(data, last, &lengths, bits) }
}

/// Splits `data` into literals, each followed by a number of zeros. Short runs of zeros count as literals.
fn for_each_run(data: &[u8], mut run: impl FnMut(&[u8], usize)) {
    let is_zero = |at: usize| data.get(at..at + 8).is_some_and(|eight| eight == [0; 8]);
    let (mut start, mut at) = (0, 0);
    while at + 8 <= data.len() {
        if !is_zero(at) {
            at += 8;
            continue;
        }
        let before = data[start..at].iter().rev().take_while(|&&byte| byte == 0).count();
        let begin = at - before;
        while is_zero(at) {
            at += 8;
        }
        at += data[at..].iter().take_while(|&&byte| byte == 0).count();
        run(&data[start..begin], at - begin);
        start = at;
    }
    run(&data[start..], 0);
}

/// One symbol of an encoded run of zeros.
enum ZeroToken {
    Literal,
    Match(usize),
}

/// Encodes a run of zeros as literals and matches. The first zero is a literal, for the matches to repeat.
fn split_zeros(zeros: usize, mut emit: impl FnMut(ZeroToken)) {
    if zeros == 0 {
        return;
    }
    emit(ZeroToken::Literal);
    let mut left = zeros - 1;
    while left >= 3 {
        let length = left.min(MAX_MATCH);
        emit(ZeroToken::Match(length));
        left -= length;
    }
    (0..left).for_each(|_| emit(ZeroToken::Literal));
}

/// Counts bytes in four tables: incrementing the same counter twice in a row stalls the processor.
fn count_bytes(tables: &mut [[u32; 256]; 4], bytes: &[u8]) {
    let (groups, rest) = bytes.as_chunks::<4>();
    for group in groups {
        for (table, &byte) in tables.iter_mut().zip(group) {
            table[usize::from(byte)] += 1;
        }
    }
    rest.iter().for_each(|&byte| tables[0][usize::from(byte)] += 1);
}

/// A match length as deflate encodes it.
struct LengthCode {
    symbol: usize,
    /// Value of the extra bits behind the symbol's code.
    extra: u32,
    extra_bits: u8,
}

/// Extra bits behind the length symbols, 257 and up.
const EXTRA_BITS: [u8; 29] =
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];

fn length_code(length: usize) -> LengthCode {
    if length == MAX_MATCH {
        return LengthCode { symbol: SYMBOLS - 1, extra: 0, extra_bits: 0 };
    }
    let (mut first, mut index) = (3, 0);
    while first + (1 << EXTRA_BITS[index]) <= length {
        first += 1 << EXTRA_BITS[index];
        index += 1;
    }
    LengthCode {
        symbol: END_OF_BLOCK + 1 + index,
        extra: (length - first) as u32,
        extra_bits: EXTRA_BITS[index],
    }
}

/// Upper bound of what a segment needs beside its symbols: block header and byte-aligned end.
const OVERHEAD_BYTES: usize = 3 + 8 + SYMBOLS.div_ceil(2) + 8;

/// Writes a block with its own Huffman codes; `bits` is an upper bound of its size.
fn encode(data: &[u8], last: bool, lengths: &[u8], bits: usize) -> Vec<u8> {
    let mut out = BitWriter::with_capacity(bits / 8 + 1);
    write_header(&mut out, last, lengths);
    let codes = huffman::canonical_codes(lengths);
    // Code and length in one table: one lookup per byte.
    let mut table = [(0u16, 0u8); SYMBOLS];
    for (entry, pair) in table.iter_mut().zip(codes.into_iter().zip(lengths.iter().copied())) {
        *entry = pair;
    }
    let put_symbol =
        |out: &mut BitWriter, symbol: usize| out.put(table[symbol].0.into(), table[symbol].1.into());
    for_each_run(data, |literals, zeros| {
        const { assert!(4 * MAX_CODE_BITS <= 56) };
        let (groups, rest) = literals.as_chunks::<4>();
        for group in groups {
            let (mut bits, mut count) = (0, 0);
            for &byte in group {
                let (code, length) = table[usize::from(byte)];
                bits |= u64::from(code) << count;
                count += u32::from(length);
            }
            out.put(bits, count);
        }
        rest.iter().for_each(|&byte| put_symbol(&mut out, byte.into()));
        split_zeros(zeros, |token| match token {
            ZeroToken::Literal => put_symbol(&mut out, 0),
            ZeroToken::Match(length) => {
                let code = length_code(length);
                put_symbol(&mut out, code.symbol);
                // One more bit for the distance, whose code is 0.
                out.put(code.extra.into(), u32::from(code.extra_bits + DISTANCE_BITS));
            }
        });
    });
    put_symbol(&mut out, END_OF_BLOCK);
    if !last {
        // An empty stored block aligns the next segment to a byte.
        out.put(0, 3);
        out.align();
        out.put(0xffff_0000, 32);
    }
    out.finish()
}

/// Writes the header of a dynamic Huffman block. The code lengths are written uncompressed, four bits each.
fn write_header(out: &mut BitWriter, last: bool, lengths: &[u8]) {
    out.put(u64::from(last) | 0b100, 3);
    out.put(SYMBOLS as u64 - 257, 5);
    out.put(0, 5);
    out.put(19 - 4, 4);
    // The code length alphabet in deflate's order: three repeat codes, which are not used, then the lengths 0 to 15.
    (0..3).for_each(|_| out.put(0, 3));
    (0..16).for_each(|_| out.put(4, 3));
    for &length in lengths.iter().chain(&[DISTANCE_BITS]) {
        out.put(u64::from(length.reverse_bits() >> 4), 4);
    }
}

/// Writes stored blocks, for data that Huffman codes would not shorten.
fn store(data: &[u8], last: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() + 5 * (data.len() / MAX_STORED + 1));
    let blocks = data.len().div_ceil(MAX_STORED);
    for (index, block) in data.chunks(MAX_STORED).enumerate() {
        let length = block.len() as u16;
        out.push(u8::from(last && index + 1 == blocks));
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend(block);
    }
    out
}

/// An Adler-32 checksum that can be combined with that of the data behind it.
pub(crate) struct Adler32 {
    length: u64,
    a: u64,
    b: u64,
}

const ADLER_MODULUS: u64 = 65521;

impl Adler32 {
    pub(crate) fn new(data: &[u8]) -> Adler32 {
        let sum = u64::from(simd_adler32::adler32(&data));
        Adler32 { length: data.len() as u64, a: sum & 0xffff, b: sum >> 16 }
    }

    /// Extends the checksum by that of the data that follows. Both `a` sums start at 1, which counts only once.
    pub(crate) fn append(&mut self, next: &Adler32) {
        let before = self.a + ADLER_MODULUS - 1;
        self.b = (self.b + next.b + next.length % ADLER_MODULUS * before) % ADLER_MODULUS;
        self.a = (before + next.a) % ADLER_MODULUS;
        self.length += next.length;
    }

    /// The last four bytes of a zlib stream.
    pub(crate) fn to_bytes(&self) -> [u8; 4] {
        ((self.b << 16 | self.a) as u32).to_be_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adler32(data: &[u8]) -> u32 {
        u32::from_be_bytes(Adler32::new(data).to_bytes())
    }

    #[test]
    fn checksums_of_segments_combine() {
        assert_eq!(adler32(b"Wikipedia"), 0x11E6_0398);
        assert_eq!(adler32(b""), 1);
        let data: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(i) >> 3) as u8).collect();
        for cut in [0, 1, 2047, 70_000, 100_000] {
            let mut sum = Adler32::new(&data[..cut]);
            sum.append(&Adler32::new(&data[cut..]));
            assert_eq!(sum.to_bytes(), Adler32::new(&data).to_bytes(), "{cut}");
        }
    }

    #[test]
    fn match_lengths_have_deflates_symbols() {
        let code = |length| {
            let code = length_code(length);
            (code.symbol, code.extra, code.extra_bits)
        };
        assert_eq!((code(3), code(10), code(11)), ((257, 0, 0), (264, 0, 0), (265, 0, 1)));
        assert_eq!((code(12), code(130), code(131)), ((265, 1, 1), (280, 15, 4), (281, 0, 5)));
        assert_eq!((code(257), code(258)), ((284, 30, 5), (285, 0, 0)));
    }

    #[test]
    fn runs_cover_all_data_and_hold_only_zeros() {
        let mut noise = 1u32;
        for length in 0..200 {
            let data: Vec<u8> = (0..length)
                .map(|_| {
                    noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    if noise >> 28 == 0 { 7 } else { 0 }
                })
                .collect();
            let mut joined = Vec::new();
            for_each_run(&data, |literals, zeros| {
                joined.extend(literals);
                joined.extend(vec![0; zeros]);
            });
            assert_eq!(joined, data);
        }
    }
}

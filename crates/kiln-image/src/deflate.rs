//! Deflate for filtered rows of a picture: quick, and in pieces that are made at the same time.
//!
//! Neighbours' differences are small numbers with few repetitions, so what is worth finding is runs of zeros; all else is a
//! matter of good codes, which each piece has of its own. Every piece but the last ends on a byte, with an empty block.

use crate::huffman::{self, LONGEST};

const END: usize = 256;
/// Literals, the end and lengths of repetitions.
const SYMBOLS: usize = 286;
/// What a repetition goes back is always one byte: a single code of a single bit.
const DISTANCE_BITS: u8 = 1;
const LONGEST_REPETITION: usize = 258;
/// A stored block holds no more.
const MOST_STORED: usize = 65535;

/// The deflate blocks of a piece. Those of several, one behind the other, are one stream.
pub(crate) fn piece(data: &[u8], last: bool) -> Vec<u8> {
    let mut counts = [0; SYMBOLS];
    let mut literal = [[0; 256]; 4];
    counts[END] = 1;
    each_part(data, |literals, zeros| {
        count(&mut literal, literals);
        each_repetition(zeros, |length| match length {
            0 => counts[0] += 1,
            length => counts[repetition(length).symbol] += 1,
        });
    });
    for (byte, count) in counts[..256].iter_mut().enumerate() {
        *count += literal.iter().map(|table| table[byte]).sum::<u32>();
    }
    let lengths = huffman::lengths(&counts);
    let mut bits = 8 * HEADER_BYTES;
    for (symbol, &count) in counts.iter().enumerate() {
        let more = symbol.checked_sub(END + 1).map_or(0, |i| usize::from(EXTRA[i] + DISTANCE_BITS));
        bits += count as usize * (usize::from(lengths[symbol]) + more);
    }
    let plain = data.len() + 5 * data.len().div_ceil(MOST_STORED);
    if bits / 8 >= plain { stored(data, last) } else { coded(data, last, &lengths, bits) }
}

/// Splits into literals and the zeros behind them; short runs of zeros are literals.
fn each_part(data: &[u8], mut part: impl FnMut(&[u8], usize)) {
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
        part(&data[start..begin], at - begin);
        start = at;
    }
    part(&data[start..], 0);
}

/// A run of zeros as literals, told as 0, and lengths of repetitions.
fn each_repetition(zeros: usize, mut tell: impl FnMut(usize)) {
    if zeros == 0 {
        return;
    }
    // What the repetitions repeat.
    tell(0);
    let mut left = zeros - 1;
    while left >= 3 {
        let length = left.min(LONGEST_REPETITION);
        tell(length);
        left -= length;
    }
    (0..left).for_each(|_| tell(0));
}

/// Counts bytes in four tables, since counting the same byte twice in a row makes a processor wait.
fn count(tables: &mut [[u32; 256]; 4], bytes: &[u8]) {
    let (fours, rest) = bytes.as_chunks::<4>();
    for four in fours {
        for (table, &byte) in tables.iter_mut().zip(four) {
            table[usize::from(byte)] += 1;
        }
    }
    rest.iter().for_each(|&byte| tables[0][usize::from(byte)] += 1);
}

/// How a length is written.
struct Repetition {
    symbol: usize,
    /// Bits behind the symbol's code, and how many.
    more: u32,
    bits: u8,
}

/// Bits behind the symbols 257 and up.
const EXTRA: [u8; 29] =
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];

fn repetition(length: usize) -> Repetition {
    if length == LONGEST_REPETITION {
        return Repetition { symbol: SYMBOLS - 1, more: 0, bits: 0 };
    }
    let (mut first, mut index) = (3, 0);
    while first + (1 << EXTRA[index]) <= length {
        first += 1 << EXTRA[index];
        index += 1;
    }
    Repetition { symbol: END + 1 + index, more: (length - first) as u32, bits: EXTRA[index] }
}

/// Bits, lowest first.
struct Bits {
    bytes: Vec<u8>,
    /// Bytes that are done.
    place: usize,
    waiting: u64,
    number: u32,
}

impl Bits {
    /// Room for so many bytes.
    fn new(bytes: usize) -> Bits {
        Bits { bytes: vec![0; bytes + 16], place: 0, waiting: 0, number: 0 }
    }

    /// Up to 56 bits.
    #[inline]
    fn put(&mut self, bits: u64, number: u32) {
        self.waiting |= bits << self.number;
        self.number += number;
        self.bytes[self.place..self.place + 8].copy_from_slice(&self.waiting.to_le_bytes());
        self.place += self.number as usize / 8;
        self.waiting >>= self.number & !7;
        self.number &= 7;
    }

    /// Everything, filled up with zeros to a whole byte.
    fn finish(mut self) -> Vec<u8> {
        self.put(0, (8 - self.number) % 8);
        self.bytes.truncate(self.place);
        self.bytes
    }
}

/// A byte-aligned end of a piece, and the beginning of one, take no more than this.
const HEADER_BYTES: usize = 3 + 8 + SYMBOLS.div_ceil(2) + 8;

fn coded(data: &[u8], last: bool, lengths: &[u8], size: usize) -> Vec<u8> {
    let mut out = Bits::new(size / 8 + 1);
    head(&mut out, last, lengths);
    let codes = huffman::codes(lengths);
    // A code and how long it is, together: one look for each byte.
    let mut table = [(0u16, 0u8); SYMBOLS];
    for (entry, pair) in table.iter_mut().zip(codes.into_iter().zip(lengths.iter().copied())) {
        *entry = pair;
    }
    let symbol = |out: &mut Bits, symbol: usize| out.put(table[symbol].0.into(), table[symbol].1.into());
    each_part(data, |literals, zeros| {
        const { assert!(4 * LONGEST <= 56) };
        let (fours, rest) = literals.as_chunks::<4>();
        for four in fours {
            let (mut bits, mut number) = (0, 0);
            for &byte in four {
                let (code, length) = table[usize::from(byte)];
                bits |= u64::from(code) << number;
                number += u32::from(length);
            }
            out.put(bits, number);
        }
        rest.iter().for_each(|&byte| symbol(&mut out, byte.into()));
        each_repetition(zeros, |length| match length {
            0 => symbol(&mut out, 0),
            length => {
                let repetition = repetition(length);
                symbol(&mut out, repetition.symbol);
                // One bit more for the distance, whose code is 0.
                out.put(repetition.more.into(), u32::from(repetition.bits + DISTANCE_BITS));
            }
        });
    });
    symbol(&mut out, END);
    if !last {
        // An empty stored block brings the next piece to a whole byte.
        out.put(0, 3);
        out.put(0, (8 - out.number) % 8);
        out.put(0xffff_0000, 32);
    }
    out.finish()
}

/// The beginning of a block with codes of its own. Lengths are written as they are, four bits each.
fn head(out: &mut Bits, last: bool, lengths: &[u8]) {
    out.put(u64::from(last) | 0b100, 3);
    out.put(SYMBOLS as u64 - 257, 5);
    out.put(0, 5);
    out.put(19 - 4, 4);
    // The lengths' own codes come in deflate's order: three for repetitions, which are not used, then 0 to 15.
    (0..3).for_each(|_| out.put(0, 3));
    (0..16).for_each(|_| out.put(4, 3));
    for &length in lengths.iter().chain(&[DISTANCE_BITS]) {
        out.put(u64::from(length.reverse_bits() >> 4), 4);
    }
}

/// What codes would only make longer.
fn stored(data: &[u8], last: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() + 5 * (data.len() / MOST_STORED + 1));
    let blocks = data.len().div_ceil(MOST_STORED);
    for (number, block) in data.chunks(MOST_STORED).enumerate() {
        let length = block.len() as u16;
        out.push(u8::from(last && number + 1 == blocks));
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend(block);
    }
    out
}

/// Adler's checksum of a piece, with which those of several can be put together.
pub(crate) struct Adler {
    length: u64,
    plain: u64,
    weighted: u64,
}

const ADLER: u64 = 65521;

impl Adler {
    pub(crate) fn new(data: &[u8]) -> Adler {
        let sum = u64::from(simd_adler32::adler32(&data));
        Adler { length: data.len() as u64, plain: sum & 0xffff, weighted: sum >> 16 }
    }

    /// With what follows. Both sums begin with the same 1.
    pub(crate) fn add(&mut self, next: &Adler) {
        let before = self.plain + ADLER - 1;
        self.weighted = (self.weighted + next.weighted + next.length % ADLER * before) % ADLER;
        self.plain = (before + next.plain) % ADLER;
        self.length += next.length;
    }

    /// As zlib ends with it.
    pub(crate) fn checksum(&self) -> [u8; 4] {
        ((self.weighted << 16 | self.plain) as u32).to_be_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(data: &[u8]) -> u32 {
        u32::from_be_bytes(Adler::new(data).checksum())
    }

    #[test]
    fn checksums_of_pieces_add_up() {
        assert_eq!(sums(b"Wikipedia"), 0x11E6_0398);
        assert_eq!(sums(b""), 1);
        let data: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(i) >> 3) as u8).collect();
        for cut in [0, 1, 2047, 70_000, 100_000] {
            let mut left = Adler::new(&data[..cut]);
            left.add(&Adler::new(&data[cut..]));
            assert_eq!(left.checksum(), Adler::new(&data).checksum(), "{cut}");
        }
    }

    #[test]
    fn every_length_of_a_repetition_has_deflates_symbol() {
        let at = |length| {
            let repetition = repetition(length);
            (repetition.symbol, repetition.more, repetition.bits)
        };
        assert_eq!((at(3), at(10), at(11)), ((257, 0, 0), (264, 0, 0), (265, 0, 1)));
        assert_eq!((at(12), at(130), at(131)), ((265, 1, 1), (280, 15, 4), (281, 0, 5)));
        assert_eq!((at(257), at(258)), ((284, 30, 5), (285, 0, 0)));
    }

    #[test]
    fn parts_cover_everything_and_runs_are_all_zeros() {
        let mut noise = 1u32;
        for length in 0..200 {
            let data: Vec<u8> = (0..length)
                .map(|_| {
                    noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    if noise >> 28 == 0 { 7 } else { 0 }
                })
                .collect();
            let mut again = Vec::new();
            each_part(&data, |literals, zeros| {
                again.extend(literals);
                again.extend(vec![0; zeros]);
            });
            assert_eq!(again, data);
        }
    }
}

//! Huffman codes of a JPEG image: the standard's tables, and the writer of blocks.

/// A Huffman code as a file holds it.
pub(crate) struct Code {
    /// Number of codes of each length, from 1 bit on.
    pub counts: [u8; 16],
    /// Symbols in the order of their codes.
    pub values: &'static [u8],
}

const DC_VALUES: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];

/// Table K.3.
pub(crate) const LUMA_DC: Code =
    Code { counts: [0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], values: &DC_VALUES };
/// Table K.4.
pub(crate) const CHROMA_DC: Code =
    Code { counts: [0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], values: &DC_VALUES };
/// Table K.5.
pub(crate) const LUMA_AC: Code = Code {
    counts: [0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 0x7d],
    values: &[
        0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07, 0x22,
        0x71, 0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0, 0x24, 0x33,
        0x62, 0x72, 0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x34,
        0x35, 0x36, 0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55,
        0x56, 0x57, 0x58, 0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76,
        0x77, 0x78, 0x79, 0x7a, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96,
        0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5,
        0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4,
        0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf1,
        0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa,
    ],
};
/// Table K.6.
pub(crate) const CHROMA_AC: Code = Code {
    counts: [0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 0x77],
    values: &[
        0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71, 0x13,
        0x22, 0x32, 0x81, 0x08, 0x14, 0x42, 0x91, 0xa1, 0xb1, 0xc1, 0x09, 0x23, 0x33, 0x52, 0xf0, 0x15, 0x62,
        0x72, 0xd1, 0x0a, 0x16, 0x24, 0x34, 0xe1, 0x25, 0xf1, 0x17, 0x18, 0x19, 0x1a, 0x26, 0x27, 0x28, 0x29,
        0x2a, 0x35, 0x36, 0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54,
        0x55, 0x56, 0x57, 0x58, 0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75,
        0x76, 0x77, 0x78, 0x79, 0x7a, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94,
        0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3,
        0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2,
        0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea,
        0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa,
    ],
};

/// Code and length in bits of each symbol.
pub(crate) type CodeTable = [(u16, u8); 256];

impl Code {
    pub(crate) fn codes(&self) -> CodeTable {
        let mut table = [(0, 0); 256];
        let mut values = self.values.iter();
        let mut code = 0;
        for (length, &count) in (1..).zip(&self.counts) {
            for &value in values.by_ref().take(count.into()) {
                table[usize::from(value)] = (code, length);
                code += 1;
            }
            code <<= 1;
        }
        table
    }
}

/// Symbol: the block has no further coefficient.
const END_OF_BLOCK: usize = 0;
/// Symbol: sixteen zeros.
const SIXTEEN_ZEROS: usize = 0xf0;

/// A bit stream, highest bit first, with a zero behind each byte of ones.
#[derive(Default)]
pub(crate) struct BitWriter {
    bytes: Vec<u8>,
    pending: u64,
    pending_bits: u32,
}

impl BitWriter {
    /// Appends up to 32 bits.
    #[inline(always)]
    fn put(&mut self, bits: u32, count: u32) {
        self.pending = self.pending << count | u64::from(bits);
        self.pending_bits += count;
        if self.pending_bits >= 32 {
            self.pending_bits -= 32;
            self.put_word((self.pending >> self.pending_bits) as u32);
        }
    }

    #[inline(always)]
    fn put_word(&mut self, word: u32) {
        // Whether a byte of ones is among them, and sometimes without one.
        if word & 0x8080_8080 & !word.wrapping_add(0x0101_0101) == 0 {
            self.bytes.extend_from_slice(&word.to_be_bytes());
        } else {
            word.to_be_bytes().into_iter().for_each(|byte| self.put_byte(byte));
        }
    }

    fn put_byte(&mut self, byte: u8) {
        self.bytes.push(byte);
        if byte == 0xff {
            self.bytes.push(0);
        }
    }

    /// A symbol, and behind it the bits of a coefficient whose size the symbol tells.
    #[inline(always)]
    fn put_value(&mut self, value: i16, zeros: usize, table: &CodeTable) {
        let size = 31 - (2 * u32::from(value.unsigned_abs()) + 1).leading_zeros();
        // Negative numbers are written as their ones' complement.
        let bits = (value + (value >> 15)) as u32 & ((1 << size) - 1);
        let (code, length) = table[zeros << 4 | size as usize];
        self.put(u32::from(code) << size | bits, u32::from(length) + size);
    }

    fn put_symbol(&mut self, symbol: usize, table: &CodeTable) {
        self.put(table[symbol].0.into(), table[symbol].1.into());
    }

    /// Appends a block of quantized coefficients in the file's order. `previous` is the first one of the block before.
    pub(crate) fn put_block(&mut self, block: &[i16; 64], previous: i16, dc: &CodeTable, ac: &CodeTable) {
        self.put_value(block[0] - previous, 0, dc);
        let mut left = nonzero(block) & !1;
        let mut before = 0;
        while left != 0 {
            let at = left.trailing_zeros() as usize;
            left &= left - 1;
            let mut zeros = at - before - 1;
            while zeros >= 16 {
                self.put_symbol(SIXTEEN_ZEROS, ac);
                zeros -= 16;
            }
            self.put_value(block[at], zeros, ac);
            before = at;
        }
        if before < 63 {
            self.put_symbol(END_OF_BLOCK, ac);
        }
    }

    /// Pads with ones to a whole byte.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let ones = (8 - self.pending_bits % 8) % 8;
        self.put((1 << ones) - 1, ones);
        for at in (0..self.pending_bits / 8).rev() {
            self.put_byte((self.pending >> (8 * at)) as u8);
        }
        self.bytes
    }
}

/// A bit for each coefficient that is not 0, the first one's lowest.
fn nonzero(block: &[i16; 64]) -> u64 {
    let mut flags = [0u8; 64];
    for (flag, value) in flags.iter_mut().zip(block) {
        *flag = u8::from(*value != 0);
    }
    let mut mask = 0;
    for (i, eight) in flags.as_chunks::<8>().0.iter().enumerate() {
        // The product moves the flag of byte i to bit 56 + i.
        let bits = u64::from_le_bytes(*eight).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        mask |= bits << (8 * i);
    }
    mask
}

//! Writing bit streams of deflate and WebP.

/// A bit stream, lowest bit first.
pub(crate) struct BitWriter {
    bytes: Vec<u8>,
    /// Number of complete bytes.
    len: usize,
    pending: u64,
    pending_bits: u32,
}

impl BitWriter {
    pub(crate) fn with_capacity(bytes: usize) -> BitWriter {
        BitWriter { bytes: vec![0; bytes + 16], len: 0, pending: 0, pending_bits: 0 }
    }

    /// Appends up to 56 bits.
    #[inline]
    pub(crate) fn put(&mut self, bits: u64, count: u32) {
        self.pending |= bits << self.pending_bits;
        self.pending_bits += count;
        self.bytes[self.len..self.len + 8].copy_from_slice(&self.pending.to_le_bytes());
        self.len += self.pending_bits as usize / 8;
        self.pending >>= self.pending_bits & !7;
        self.pending_bits &= 7;
    }

    /// Appends what another writer holds.
    pub(crate) fn append(&mut self, other: &BitWriter) {
        self.reserve(other.len + 8);
        let (words, rest) = other.bytes[..other.len].as_chunks::<4>();
        words.iter().for_each(|word| self.put(u32::from_le_bytes(*word).into(), 32));
        rest.iter().for_each(|byte| self.put((*byte).into(), 8));
        self.put(other.pending, other.pending_bits);
    }

    /// Makes room for that many more bytes.
    pub(crate) fn reserve(&mut self, bytes: usize) {
        let needed = self.len + bytes + 16;
        if self.bytes.len() < needed {
            self.bytes.resize(needed, 0);
        }
    }

    /// Number of complete bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Pads with zeros to a whole byte.
    pub(crate) fn align(&mut self) {
        self.put(0, (8 - self.pending_bits) % 8);
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.align();
        self.bytes.truncate(self.len);
        self.bytes
    }
}

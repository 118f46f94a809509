//! The storage formats of packed tensors, with the size of their blocks.

use std::fmt;

/// The storage format of a packed tensor.
///
/// The `Q` and `IQ` formats are GGUF's: blocks of 32 or 256 values that contain their scales. The others store scales
/// separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names say it all; the decoders document the blocks")]
pub enum Format {
    F32,
    BF16,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    F8E4M3,
    F8E5M2,
    NvFp4,
    I8,
}

/// Format, name, values per block, bytes per block; in the order of the enum.
const TABLE: [(Format, &str, usize, usize); 19] = [
    (Format::F32, "f32", 1, 4),
    (Format::BF16, "bf16", 1, 2),
    (Format::F16, "f16", 1, 2),
    (Format::Q4_0, "q4_0", 32, 18),
    (Format::Q4_1, "q4_1", 32, 20),
    (Format::Q5_0, "q5_0", 32, 22),
    (Format::Q5_1, "q5_1", 32, 24),
    (Format::Q8_0, "q8_0", 32, 34),
    (Format::Q2K, "q2_k", 256, 84),
    (Format::Q3K, "q3_k", 256, 110),
    (Format::Q4K, "q4_k", 256, 144),
    (Format::Q5K, "q5_k", 256, 176),
    (Format::Q6K, "q6_k", 256, 210),
    (Format::Iq4Nl, "iq4_nl", 32, 18),
    (Format::Iq4Xs, "iq4_xs", 256, 136),
    (Format::F8E4M3, "f8_e4m3", 1, 1),
    (Format::F8E5M2, "f8_e5m2", 1, 1),
    (Format::NvFp4, "nvfp4", 16, 8),
    (Format::I8, "int8", 1, 1),
];

impl Format {
    /// Every format.
    pub fn all() -> impl Iterator<Item = Format> {
        TABLE.iter().map(|row| row.0)
    }

    fn info(self) -> (&'static str, usize, usize) {
        let (_, name, values, bytes) = TABLE[self as usize];
        (name, values, bytes)
    }

    /// The lower-case name used in messages and on the command line.
    pub fn name(self) -> &'static str {
        self.info().0
    }

    /// Values per block.
    pub fn block_values(self) -> usize {
        self.info().1
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        self.info().2
    }

    /// Bytes of a row; `None` if it is not a whole number of blocks, or overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let (_, values, bytes) = self.info();
        cols.is_multiple_of(values).then(|| (cols / values).checked_mul(bytes)).flatten()
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_formats() {
        for (i, format) in Format::all().enumerate() {
            assert_eq!(format as usize, i, "{format}");
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(Format::Q4K.row_bytes(512), Some(288));
        assert_eq!(Format::Q4K.row_bytes(300), None);
        assert_eq!(Format::BF16.row_bytes(3), Some(6));
        assert_eq!(Format::F32.row_bytes(usize::MAX), None);
    }
}

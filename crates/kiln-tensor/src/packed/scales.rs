//! The scales of packed tensors: per tensor, per row, or per block of 16 columns (nvfp4).

use std::sync::Arc;

use bytes::Bytes;

/// Columns that share one scale in nvfp4.
pub(super) const BLOCK_COLS: usize = 16;

/// Scales as a [`PackedTensor`](super::PackedTensor) keeps them. Row slices share them and remember their first row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SharedScales {
    None,
    PerTensor(f32),
    PerRow { scales: Arc<[f32]>, first_row: usize },
    PerBlock { scales: BlockScales, first_row: usize },
}

/// The scales of an nvfp4 matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockScales {
    /// One e4m3 scale per 16 columns.
    pub scales: Bytes,
    /// Whether the scales are stored in tiles of 128 rows by 4 scales, as tensor cores read them, with rows and scales
    /// rounded up to whole tiles. Otherwise they are row-major.
    pub swizzled: bool,
    /// Whether the first of two values is in the high nibble of their byte.
    pub high_first: bool,
    /// The scale of the whole matrix.
    pub global: f32,
}

/// The scales of a packed tensor in a plain layout ([`PackedTensor::scales`](super::PackedTensor::scales)).
#[derive(Clone, Debug, PartialEq)]
pub enum Scales {
    /// One scale for all values.
    PerTensor(f32),
    /// One scale per row.
    PerRow(Vec<f32>),
    /// One scale per 16 columns, times a global one.
    PerBlock {
        /// The scale of the whole matrix.
        global: f32,
        /// e4m3 scales, row-major.
        scales: Vec<u8>,
        /// Whether the first of two values is in the high nibble of their byte.
        high_first: bool,
    },
}

impl BlockScales {
    /// Number of scales that a matrix of this shape needs, or `None` if it overflows.
    pub fn expected_len(&self, [rows, cols]: [usize; 2]) -> Option<usize> {
        let blocks = cols.div_ceil(BLOCK_COLS);
        if self.swizzled {
            rows.checked_next_multiple_of(128)?.checked_mul(blocks.checked_next_multiple_of(4)?)
        } else {
            rows.checked_mul(blocks)
        }
    }

    /// The e4m3 scale of one block of a row.
    #[inline(always)]
    pub(super) fn get(&self, row: usize, block: usize, blocks_per_row: usize) -> u8 {
        let index = if self.swizzled {
            swizzled_index(row, block, blocks_per_row)
        } else {
            row * blocks_per_row + block
        };
        self.scales[index]
    }
}

/// Index of a block's scale in the swizzled layout of [`BlockScales`].
#[inline(always)]
pub fn swizzled_index(row: usize, block: usize, blocks_per_row: usize) -> usize {
    let tile = row / 128 * blocks_per_row.div_ceil(4) + block / 4;
    tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
}

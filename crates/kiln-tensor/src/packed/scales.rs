//! The scales of packed tensors: per tensor, per row, per tile of rows and columns (block-wise fp8), or per block of 16
//! columns (nvfp4).

use std::sync::Arc;

use bytes::Bytes;

/// Columns that share one scale in nvfp4.
pub const BLOCK_COLS: usize = 16;

/// Scales as a [`PackedTensor`](super::PackedTensor) keeps them. Row slices share them and remember their first row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SharedScales {
    None,
    PerTensor(f32),
    PerRow { scales: Arc<[f32]>, first_row: usize },
    PerTile { scales: TileScales, first_row: usize },
    PerBlock { scales: BlockScales, first_row: usize },
}

/// One scale for each tile of a matrix, row-major. The last tiles of rows and columns may be partial.
#[derive(Clone, Debug, PartialEq)]
pub struct TileScales {
    /// The scales.
    pub scales: Arc<[f32]>,
    /// Rows and columns of a tile. The columns are a multiple of [`TileScales::COLS`].
    pub tile: [usize; 2],
}

impl TileScales {
    /// Columns of a tile are a multiple of this, so that a backend may decode as many values with one scale.
    pub const COLS: usize = 8;

    /// Tiles down and across a matrix of this shape; `None` if tiles of this size can't be used.
    pub fn tiles(&self, [rows, cols]: [usize; 2]) -> Option<[usize; 2]> {
        let [high, wide] = self.tile;
        let usable = high > 0 && wide > 0 && wide.is_multiple_of(TileScales::COLS);
        usable.then(|| [rows.div_ceil(high), cols.div_ceil(wide)])
    }

    /// Multiplies the values of `row` from column `from` on, of a matrix with this many columns.
    #[inline(always)]
    pub(super) fn apply(&self, row: usize, from: usize, cols: usize, values: &mut [f32]) {
        let [high, wide] = self.tile;
        let scales = &self.scales[row / high * cols.div_ceil(wide)..];
        let (mut column, mut rest) = (from, values);
        while !rest.is_empty() {
            let (tile, after) = rest.split_at_mut(rest.len().min(wide - column % wide));
            let scale = scales[column / wide];
            tile.iter_mut().for_each(|v| *v *= scale);
            column += tile.len();
            rest = after;
        }
    }
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
    /// One scale per tile of rows and columns.
    PerTile {
        /// The scales of all tiles that the rows are in, row-major.
        scales: Vec<f32>,
        /// Rows and columns of a tile.
        tile: [usize; 2],
        /// Where in its tile the first row is.
        first_row: usize,
    },
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

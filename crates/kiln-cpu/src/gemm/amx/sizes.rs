//! The sizes of tiles, and of the blocks that they are grouped in.

use std::ops::Range;

use crate::gemm::blocks::{Block, BlockSizes};

/// Bytes of a row of a tile.
pub(crate) const TILE_ROW_BYTES: usize = 64;
/// bf16 values of a row of a tile.
pub(crate) const TILE_ROW_BF16: usize = 32;
/// Rows of two left tiles, or columns of two right tiles.
pub(crate) const PAIR: usize = 32;
/// Sums of a quad: two left by two right tiles.
pub(crate) const QUAD_SUMS: usize = PAIR * PAIR;

/// Tokens of a block. A [`KC_BYTES`] block of them (384 KiB) stays in the L2 cache, and so does the next one.
pub(super) const MC: usize = 384;
/// Weight rows of a block; their sums (384 KiB) stay there too.
pub(super) const NC: usize = 256;
/// Column blocks per group.
pub(super) const GROUP_COLS: usize = 4;
/// Bytes of a row summed before the tiles are stored. The weight rows of a step (32 KiB) stay in the L1 cache
/// while the tokens are streamed.
pub(super) const KC_BYTES: usize = 1024;

/// The block sizes of a linear layer.
pub(super) fn block_sizes(max_cols: usize, group_cols: usize) -> BlockSizes {
    BlockSizes { tile_rows: PAIR, max_rows: MC, min_rows: 2 * PAIR, max_cols, min_cols: 2 * PAIR, group_cols }
}

/// The [`PAIR`]s of rows that a block has.
pub(super) fn row_pairs(block: &Block) -> Range<usize> {
    block.rows.start / PAIR..block.rows.end.div_ceil(PAIR)
}

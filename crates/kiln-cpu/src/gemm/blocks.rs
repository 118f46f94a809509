//! The task loop that all matrix products share.
//!
//! A [`BlockGrid`] cuts the result of a product into blocks of whole register tiles, one task each, and runs them on
//! the thread pool with one [`Scratch`] per thread. How the result is cut decides which thread computes a tile, never
//! the order of its sums: results don't depend on the number of threads.

use std::ops::Range;

use kiln_ops::Result;

use crate::Context;
use crate::buffer::Buffer;

/// Sums that fit the L2 cache (512 KiB) beside the packed operand of [`BlockGrid::row_strips`].
const STRIP_SUMS: usize = 1 << 17;

/// The block sizes of one kind of product. [`BlockGrid::balanced`] shrinks blocks to keep all threads busy.
pub(crate) struct BlockSizes {
    /// Rows of a register tile; blocks have whole tiles.
    pub tile_rows: usize,
    /// Maximum rows of a block (MC), and the minimum it is shrunk to.
    pub max_rows: usize,
    pub min_rows: usize,
    /// Maximum columns of a block (NC), and the minimum it is shrunk to.
    pub max_cols: usize,
    pub min_cols: usize,
    /// Adjacent column blocks that all row blocks process before the next group begins: their weights are then read
    /// from memory once, and consecutive tasks mostly share their rows.
    pub group_cols: usize,
}

/// A block of a product's result.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

/// One call of [`BlockGrid::run`]'s closure.
// Only AMX prefetches by it.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct BlockTask {
    pub block: Block,
    /// The block that this thread will probably compute next, for prefetching.
    pub next: Block,
    /// The rows of this thread's previous block; empty at first.
    pub previous_rows: Range<usize>,
}

/// The result of a product cut into blocks. Rows and columns count from 0.
pub(crate) struct BlockGrid {
    rows: usize,
    cols: usize,
    /// Rows of a block; the last one may have fewer.
    pub block_rows: usize,
    /// Columns of a block; the last one may have fewer.
    pub block_cols: usize,
    row_blocks: usize,
    col_blocks: usize,
    group_cols: usize,
}

impl BlockGrid {
    /// Blocks of a fixed size.
    pub fn new([rows, cols]: [usize; 2], [block_rows, block_cols]: [usize; 2]) -> BlockGrid {
        let (row_blocks, col_blocks) = (rows.div_ceil(block_rows), cols.div_ceil(block_cols));
        BlockGrid { rows, cols, block_rows, block_cols, row_blocks, col_blocks, group_cols: 1 }
    }

    /// Blocks as large as `sizes` allows, but small enough that no thread idles long at the end.
    pub fn balanced(threads: usize, [rows, cols]: [usize; 2], sizes: &BlockSizes) -> BlockGrid {
        let mut block_cols = sizes.max_cols;
        let mut row_blocks = rows.div_ceil(sizes.max_rows).max(1);
        // Blocks of about equal height, in whole tiles.
        let block_rows = |row_blocks: usize| rows.div_ceil(row_blocks).next_multiple_of(sizes.tile_rows);
        let min_tasks = if threads == 1 { 1 } else { 6 * threads };
        while cols.div_ceil(block_cols) * row_blocks < min_tasks && block_cols > sizes.min_cols {
            block_cols /= 2;
        }
        while cols.div_ceil(block_cols) * row_blocks < min_tasks && block_rows(row_blocks) > sizes.min_rows {
            row_blocks += 1;
        }
        let block_rows = block_rows(row_blocks).max(sizes.tile_rows);
        BlockGrid { group_cols: sizes.group_cols, ..BlockGrid::new([rows, cols], [block_rows, block_cols]) }
    }

    /// Strips of at most `max_rows` rows over all columns, whose sums (`stride` per row) stay in the L2 cache.
    pub fn row_strips(
        threads: usize,
        [rows, cols]: [usize; 2],
        stride: usize,
        tile_rows: usize,
        max_rows: usize,
    ) -> BlockGrid {
        let fair = rows.div_ceil(4 * threads).max(1);
        let strip = (STRIP_SUMS / stride.max(1)).clamp(tile_rows, max_rows).min(fair);
        BlockGrid::new([rows, cols], [strip.next_multiple_of(tile_rows), cols.max(1)])
    }

    fn tasks(&self) -> usize {
        self.row_blocks * self.col_blocks
    }

    /// The block of a task: groups of column blocks, in each the row blocks, for each the group's columns.
    fn block(&self, task: usize) -> Block {
        let first = task / (self.row_blocks * self.group_cols) * self.group_cols;
        let (in_group, task) = (self.group_cols.min(self.col_blocks - first), task - first * self.row_blocks);
        let (row, col) = (task / in_group * self.block_rows, (first + task % in_group) * self.block_cols);
        Block {
            rows: row..self.rows.min(row + self.block_rows),
            cols: col..self.cols.min(col + self.block_cols),
        }
    }

    /// Calls `work` once per block, on all threads, each of which reuses one [`Scratch`].
    pub fn run(
        &self,
        cx: &Context,
        scratch: ScratchSizes,
        work: impl Fn(BlockTask, &mut Scratch) + Sync,
    ) -> Result<()> {
        let tasks = self.tasks();
        let state = || Ok((Scratch::new(cx, &scratch)?, 0..0));
        cx.pool.for_each_with(tasks, state, |task, (scratch, previous_rows)| {
            let block = self.block(task);
            let next = self.block((task + cx.pool.threads()).min(tasks - 1));
            let previous_rows = std::mem::replace(previous_rows, block.rows.clone());
            work(BlockTask { block, next, previous_rows }, scratch);
        })
    }
}

/// The buffers of one thread, with whatever values its previous block left in them. A product sizes those it uses; the
/// others are empty.
// Only AMX has sums in tiles.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Scratch {
    /// Bytes of an operand packed for one block of the sum. Aligned for every element type.
    pub packed: Buffer<u8>,
    /// Sums as AMX stores them: quads of tiles.
    pub tile_sums: Buffer<f32>,
    /// Rows of sums as the epilogue takes them.
    pub sums: Buffer<f32>,
    /// Packed right operands of the low-rank updates.
    pub updates: Buffer<f32>,
    /// The weight scales of the block's columns.
    pub col_scales: Buffer<f32>,
}

/// The lengths of a [`Scratch`]'s buffers, in elements.
#[derive(Default)]
pub(crate) struct ScratchSizes {
    pub packed: usize,
    pub tile_sums: usize,
    pub sums: usize,
    pub updates: usize,
    pub col_scales: usize,
}

impl Scratch {
    fn new(cx: &Context, sizes: &ScratchSizes) -> Result<Scratch> {
        Ok(Scratch {
            packed: cx.buffer(sizes.packed)?,
            tile_sums: cx.buffer(sizes.tile_sums)?,
            sums: cx.buffer(sizes.sums)?,
            updates: cx.buffer(sizes.updates)?,
            col_scales: cx.buffer(sizes.col_scales)?,
        })
    }

    /// Copies the scales of some columns to `col_scales`, zeros up to `width`.
    pub fn load_col_scales(&mut self, scales: &[f32], width: usize) {
        let (inside, padding) = self.col_scales[..width].split_at_mut(scales.len());
        inside.copy_from_slice(scales);
        padding.fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_belongs_to_one_block() {
        let tile = |max_cols, group_cols| BlockSizes {
            tile_rows: 32,
            max_rows: 384,
            min_rows: 64,
            max_cols,
            min_cols: 64,
            group_cols,
        };
        for size in [[1, 1], [70, 40], [700, 2700], [1536, 3072], [64, 5000]] {
            for grid in [
                BlockGrid::balanced(2, size, &tile(256, 4)),
                BlockGrid::balanced(2, size, &tile(128, 16)),
                BlockGrid::balanced(1, size, &tile(128, 1)),
                BlockGrid::row_strips(3, size, size[1], 14, 512),
                BlockGrid::new(size, [size[0], 64]),
            ] {
                let mut seen = vec![0; size[0] * size[1]];
                for task in 0..grid.tasks() {
                    let Block { rows, cols } = grid.block(task);
                    rows.for_each(|row| seen[row * size[1]..][cols.clone()].iter_mut().for_each(|n| *n += 1));
                }
                assert!(seen.iter().all(|&n| n == 1), "{size:?}");
            }
        }
    }
}

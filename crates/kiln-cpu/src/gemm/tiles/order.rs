//! How a product is cut into tasks, in which order these come, and what is fetched for the next ones.

use std::ops::Range;

use super::pack::{LINE, PAIR};
use crate::gemm::cut::{Blocks, Cut};

/// Tokens that a thread works on at once. A block of their columns (384 KiB) stays in the second-level cache, and so
/// does the next one.
const TOKENS_AT_ONCE: usize = 384;
/// Weight rows that a thread works on at once; their sums (384 KiB) stay there too.
const COLS_AT_ONCE: usize = 256;
/// Bands of columns that all strips of rows go through before the next ones, so that their weights come from memory
/// once, and that one task's tokens are mostly the next one's.
const BANDS_AT_ONCE: usize = 4;

/// Bytes of a strip's tokens that stay in the second-level cache from one task to the next, if there is little beside
/// them: fewer columns at a time, and more bands before the next strip.
const NEAR: usize = 5 << 18;
const COLS_BESIDE: usize = 128;
const BANDS_BESIDE: usize = 16;

/// Rows, counted from the first of the left operand, and columns of a task.
pub(super) struct Area {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl Area {
    pub fn pairs(&self) -> Range<usize> {
        self.rows.start / PAIR..self.rows.end.div_ceil(PAIR)
    }
}

/// The tasks of a product, and their order.
pub(super) struct Order {
    pub cut: Cut,
    /// Whether the tokens of a strip stay near from one task to the next.
    pub near: bool,
    size: [usize; 2],
    bands: usize,
    at_once: usize,
}

impl Order {
    /// Of a product with so many rows and columns.
    pub fn new(threads: usize, size: [usize; 2]) -> Order {
        Order::with(threads, size, false)
    }

    /// The same for tokens of so many bytes, which a weight in tiles doesn't drive out of the cache.
    pub fn of_bytes(threads: usize, size: [usize; 2], depth: usize) -> Order {
        Order::with(threads, size, TOKENS_AT_ONCE * depth <= NEAR)
    }

    fn with(threads: usize, size: [usize; 2], near: bool) -> Order {
        let (cols, at_once) = if near { (COLS_BESIDE, BANDS_BESIDE) } else { (COLS_AT_ONCE, BANDS_AT_ONCE) };
        let blocks = Blocks { tile_rows: PAIR, rows: [TOKENS_AT_ONCE, 2 * PAIR], cols: [cols, 2 * PAIR] };
        let cut = Cut::new(threads, size, &blocks);
        let bands = size[1].div_ceil(cut.cols);
        Order { cut, near, size, bands, at_once }
    }

    pub fn area(&self, task: usize) -> Area {
        let Cut { rows, cols, strips, .. } = self.cut;
        let first = task / (strips * self.at_once) * self.at_once;
        let (bands, task) = (self.at_once.min(self.bands - first), task - first * strips);
        let (row, col) = (task / bands * rows, (first + task % bands) * cols);
        Area { rows: row..self.size[0].min(row + rows), cols: col..self.size[1].min(col + cols) }
    }
}

/// What comes into the second-level cache during a product.
pub(super) struct Fetch<'a> {
    /// Weight rows that are to be read soon, and their distance.
    pub rows: Option<(&'a [u8], usize)>,
    /// Which of them this product's turn is.
    pub turn: Range<usize>,
    /// Tiles that are to be read later.
    pub ahead: &'a [u8],
}

impl Fetch<'_> {
    /// Bytes of the tiles ahead that a step asks for.
    pub const AHEAD: usize = 256;

    #[inline(always)]
    pub fn step(&self, step: usize) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let ask = |p: *const u8, offset: usize| {
            // SAFETY: asking for memory never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(offset).cast()) };
        };
        if let Some((rows, stride)) = self.rows {
            self.turn.clone().for_each(|row| ask(rows.as_ptr(), row * stride + step * LINE));
        }
        for offset in (0..Self::AHEAD).step_by(LINE) {
            ask(self.ahead.as_ptr(), step * Self::AHEAD + offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_belongs_to_one_task() {
        for size in [[1, 1], [70, 40], [700, 2700], [1536, 3072], [64, 5000]] {
            for order in [Order::new(2, size), Order::of_bytes(2, size, 3072)] {
                let mut seen = vec![0; size[0] * size[1]];
                for task in 0..order.cut.tasks {
                    let Area { rows, cols } = order.area(task);
                    rows.for_each(|row| seen[row * size[1]..][cols.clone()].iter_mut().for_each(|n| *n += 1));
                }
                assert!(seen.iter().all(|&n| n == 1), "{size:?}");
            }
        }
    }
}

//! Grids of launches.

/// Default threads per block.
pub(crate) const THREADS: usize = 256;

/// Grid for `n` elements, eight per thread.
pub(crate) fn elementwise_grid(n: usize) -> [usize; 2] {
    [n.div_ceil(8 * THREADS), 1]
}

/// Grid for rows, eight columns per thread.
pub(crate) fn row_grid(rows: usize, cols: usize) -> [usize; 2] {
    [(rows * cols.div_ceil(8)).div_ceil(THREADS), 1]
}

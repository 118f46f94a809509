/// How the result of a product is cut into tasks. This changes who computes a tile, never how.
pub(super) struct Cut {
    /// Rows of a strip: whole tiles, strips of about equal height.
    pub rows: usize,
    pub cols: usize,
    pub strips: usize,
    pub tasks: usize,
}

/// What a kind of product works on at once.
pub(super) struct Blocks {
    /// Rows of a tile.
    pub tile_rows: usize,
    /// Rows at once, and the fewest a strip is cut down to.
    pub rows: [usize; 2],
    /// Columns at once, and the fewest a band is cut down to.
    pub cols: [usize; 2],
}

impl Cut {
    /// Enough tasks that no thread idles long at the end, as large as that allows.
    pub fn new(threads: usize, [rows, cols]: [usize; 2], blocks: &Blocks) -> Cut {
        let Blocks { tile_rows, rows: [most_rows, fewest_rows], cols: [mut width, fewest_cols] } = *blocks;
        let even = |count: usize| rows.div_ceil(count).next_multiple_of(tile_rows);
        let mut count = rows.div_ceil(most_rows).max(1);
        let wanted = if threads == 1 { 1 } else { 6 * threads };
        while cols.div_ceil(width) * count < wanted && width > fewest_cols {
            width /= 2;
        }
        while cols.div_ceil(width) * count < wanted && even(count) > fewest_rows {
            count += 1;
        }
        let height = even(count).max(tile_rows);
        let strips = rows.div_ceil(height);
        Cut { rows: height, cols: width, strips, tasks: strips * cols.div_ceil(width) }
    }
}

use std::ops::Range;

use kiln_ops::Result;
#[cfg(target_arch = "x86_64")]
use kiln_tensor::bf16;

use super::cut::{Blocks, Cut};
use super::{DEPTH, Extent, Packed, Rows, multiply, pack_right};
use crate::Context;
use crate::simd::{Simd, dispatch};

/// What becomes of finished sums.
pub(crate) trait Sink: Sync {
    /// Takes a block of them, and asks for what it will touch [`ROWS_AHEAD`] rows further, be there rows or not.
    fn write<S: Simd>(&self, s: S, done: Finished<'_>);

    /// Where these rows and columns go, if that can be said plainly.
    #[cfg(target_arch = "x86_64")]
    fn plain(&self, rows: Range<usize>, cols: Range<usize>) -> Option<Plain>;
}

/// A place for bf16 results that are written past the caches, whole lines of 64 bytes: sums as they are, or what `onto`
/// makes of them.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Plain {
    pub to: *mut bf16,
    /// Elements from one row to the next.
    pub stride: usize,
    pub onto: Option<Onto>,
}

/// `residual + gate · sums`: the residual, as far apart as the results, and a gate for every column.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Onto {
    pub residual: *const bf16,
    pub gate: *const f32,
}

/// A row's results are fetched while so many rows before it are written. They lie far apart, where the machine does not
/// foresee the next one by itself.
pub(crate) const ROWS_AHEAD: usize = 4;

/// A block of finished sums: `rows` × `cols` of the result, `stride` apart in memory.
pub(crate) struct Finished<'a> {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    pub sums: &'a [f32],
    pub stride: usize,
}

impl Finished<'_> {
    /// The sums of row `row` and columns `cols`, which lie inside.
    #[inline(always)]
    pub fn sums(&self, row: usize, cols: Range<usize>) -> &[f32] {
        &self.sums[(row - self.rows.start) * self.stride + cols.start - self.cols.start..][..cols.len()]
    }
}

#[inline(always)]
fn emit_kernel<S: Simd, K: Sink>(s: S, sink: &K, done: Finished<'_>) {
    sink.write(s, done);
}

dispatch! {
    /// Hands a block of sums to the sink.
    pub(crate) fn emit<K: Sink>(sink: &K, done: Finished<'_>) => emit_kernel;
}

/// One of the products that add up to the result; `right` has a row for every column of the result.
pub(crate) struct Term<'a, R> {
    pub left: &'a Packed,
    pub right: R,
    /// The columns of the result to which it contributes.
    pub cols: Range<usize>,
}

/// Columns of the result that a thread works on at once. Their panels (196 KiB) and sums stay in the second-level
/// cache.
const COLS_AT_ONCE: usize = 128;
/// Rows of the result that a thread works on at once: packing a weight is paid once per so many rows.
pub(crate) const ROWS_AT_ONCE: usize = 1344;

/// Hands `Σ term.left · term.rightᵀ`, the `rows` that every left operand has and columns up to `cols`, to the sink.
pub(crate) fn product<R: Rows + Send, K: Sink>(
    cx: &Context,
    terms: &[Term<'_, R>],
    rows: Range<usize>,
    cols: usize,
    sink: &K,
) -> Result<()> {
    let tile_rows = cx.level.tile_rows();
    let blocks =
        Blocks { tile_rows, rows: [ROWS_AT_ONCE, 4 * tile_rows], cols: [COLS_AT_ONCE, COLS_AT_ONCE] };
    let cut = Cut::new(cx.pool.threads(), [rows.len(), cols], &blocks);
    let width = cut.cols.next_multiple_of(cx.level.tile_cols());
    let scratch = || Ok((cx.buffer(width * DEPTH)?, cx.buffer(cut.rows * width)?));
    cx.pool.each_with(cut.tasks, scratch, |task, (panels, sums)| {
        let (row, col) = (rows.start + task % cut.strips * cut.rows, task / cut.strips * cut.cols);
        let (rows, cols) = (row..rows.end.min(row + cut.rows), col..cols.min(col + cut.cols));
        let count = cols.len().div_ceil(cx.level.tile_cols());
        let mut add = false;
        for term in terms.iter().filter(|t| t.cols.start < cols.end && cols.start < t.cols.end) {
            for (from, depth, left) in term.left.blocks(rows.clone()) {
                let panels = &mut panels[..count * cx.level.tile_cols() * depth];
                pack_right(cx.level, &term.right, cols.start, from, depth, panels);
                let size = Extent { rows: rows.len(), panels: count, depth, stride: width };
                multiply(cx.level, size, left, panels, sums, add);
                add = true;
            }
        }
        emit(cx.level, sink, Finished { rows, cols, sums, stride: width });
    })
}

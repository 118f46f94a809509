//! The interface between a product and the epilogue that writes its results.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use kiln_tensor::bf16;

use crate::simd::{Simd, dispatch};

/// The last step of a product: turns finished sums into results and writes them.
pub(crate) trait Epilogue: Sync {
    /// Writes the results of a block of sums. Prefetches what it will touch [`PREFETCH_ROWS`] rows later, even past the
    /// last row.
    fn apply<S: Simd>(&self, s: S, block: SumBlock<'_>);

    /// Where these rows and columns go, if the product may write them itself; `None` if they need [`Epilogue::apply`].
    #[cfg(target_arch = "x86_64")]
    fn direct_output(&self, rows: Range<usize>, cols: Range<usize>) -> Option<DirectOutput>;
}

/// bf16 results that a product writes itself, by non-temporal stores of whole 64-byte lines: the sums, or
/// `residual + gate · sums`.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct DirectOutput {
    pub to: *mut bf16,
    /// Elements from one row to the next.
    pub stride: usize,
    pub gated: Option<GatedResidual>,
}

/// The operands of `residual + gate · sums`: a residual with the stride of the result, and one gate per column.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct GatedResidual {
    pub residual: *const bf16,
    pub gate: *const f32,
}

/// How many rows ahead an epilogue prefetches. Rows lie far apart, where the hardware prefetcher doesn't foresee the
/// next one.
pub(crate) const PREFETCH_ROWS: usize = 4;

/// A block of finished sums: `rows` × `cols` of the result, in memory `stride` apart.
pub(crate) struct SumBlock<'a> {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    pub sums: &'a [f32],
    pub stride: usize,
}

impl SumBlock<'_> {
    /// The sums of row `row` and columns `cols`, which lie inside the block.
    #[inline(always)]
    pub fn row(&self, row: usize, cols: Range<usize>) -> &[f32] {
        &self.sums[(row - self.rows.start) * self.stride + cols.start - self.cols.start..][..cols.len()]
    }
}

#[inline(always)]
fn epilogue_kernel<S: Simd, E: Epilogue>(s: S, epilogue: &E, block: SumBlock<'_>) {
    epilogue.apply(s, block);
}

dispatch! {
    /// Applies the epilogue to a block of sums.
    pub(crate) fn run_epilogue<E: Epilogue>(epilogue: &E, block: SumBlock<'_>) => epilogue_kernel;
}

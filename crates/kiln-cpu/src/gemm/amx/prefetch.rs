//! Prefetching into the L2 cache while the tiles multiply.
//!
//! Prefetching results before they are written, and the next task's tokens, makes a layer of 1536 × 3072 → 4096 in int8 1.2
//! times as fast, one of 1536 × 3072 → 2048 in bf16 1.05 to 1.09 times, and attention 1.1 to 1.17 times.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use super::sizes::TILE_ROW_BYTES;

/// Cache lines that a step prefetches of each operand. A constant, so that the loop over them is unrolled.
pub(super) const LINES_PER_STEP: usize = 4;
/// Bytes of these lines.
pub(super) const BYTES_PER_STEP: usize = LINES_PER_STEP * TILE_ROW_BYTES;

/// Prefetches the `step`th [`BYTES_PER_STEP`] of `data`, even past its end.
#[inline(always)]
pub(super) fn prefetch_step(data: &[u8], step: usize) {
    for line in step * LINES_PER_STEP..(step + 1) * LINES_PER_STEP {
        prefetch_line(data.as_ptr(), line * TILE_ROW_BYTES);
    }
}

/// Prefetches the `step`th 64 bytes of some weight rows, which lie `stride` apart.
#[inline(always)]
pub(super) fn prefetch_rows(data: &[u8], stride: usize, rows: Range<usize>, step: usize) {
    for row in rows {
        prefetch_line(data.as_ptr(), row * stride + step * TILE_ROW_BYTES);
    }
}

#[inline(always)]
fn prefetch_line(start: *const u8, offset: usize) {
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(offset).cast()) };
}

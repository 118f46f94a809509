//! Operands that are read row by row, whatever their number format and memory layout.

#[cfg(target_arch = "x86_64")]
use kiln_tensor::bf16;

use crate::simd::Simd;

/// A matrix that is read as f32.
pub(crate) trait RowSource: Sync {
    /// Writes the values of `row` from column `from` on.
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]);
}

/// A bf16 matrix that is copied.
#[cfg(target_arch = "x86_64")]
pub(crate) trait Bf16Rows: Sync {
    /// Copies the values of `row` from column `from` on.
    fn copy_row(&self, row: usize, from: usize, out: &mut [bf16]);
}

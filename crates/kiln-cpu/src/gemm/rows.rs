//! Operands that are read row by row, whatever their number format and memory layout.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use kiln_tensor::bf16;

#[cfg(target_arch = "aarch64")]
use crate::element::convert;
#[cfg(target_arch = "aarch64")]
use crate::simd::KC;
use crate::simd::Simd;

/// A matrix that is read as f32.
pub(crate) trait RowSource: Sync {
    /// Writes the values of `row` from column `from` on.
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]);

    /// [`RowSource::read_row`] rounded to bf16.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn read_row_bf16<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [bf16]) {
        round_row_bf16(self, s, row, from, out);
    }
}

/// The values that [`RowSource::read_row`] gives, rounded to bf16.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(crate) fn round_row_bf16<S: Simd, R: RowSource + ?Sized>(
    source: &R,
    s: S,
    row: usize,
    from: usize,
    out: &mut [bf16],
) {
    let mut wide = [0.0; KC];
    for (i, out) in out.chunks_mut(KC).enumerate() {
        let wide = &mut wide[..out.len()];
        source.read_row(s, row, from + i * KC, wide);
        convert(s, wide, out);
    }
}

/// A bf16 matrix that is copied.
#[cfg(target_arch = "x86_64")]
pub(crate) trait Bf16Rows: Sync {
    /// Copies the values of `row` from column `from` on.
    fn copy_row(&self, row: usize, from: usize, out: &mut [bf16]);
}

//! An epilogue overlapped with the next product: the rows of a finished quad are written while the tiles multiply.
//!
//! It must be little work, or the products wait for it: at most about forty instructions per row, and non-temporal
//! stores, since fetching lines that are overwritten anyway would cost more than the overlap gains.
//! A tile product takes 10.5 ns with it, 14.2 with plain stores; at the end of a task non-temporal stores make it 12.5,
//! plain ones 13.3.

use std::arch::x86_64::*;

use super::sizes::{PAIR, QUAD_SUMS};
use crate::gemm::{DirectOutput, GatedResidual};
use crate::isa::Avx512;
use crate::simd::Simd;

/// The int8 sums of [`PAIR`] tokens and [`PAIR`] columns, and where their results go.
#[derive(Clone, Copy)]
pub(super) struct FinishedQuad {
    /// Integers in four tiles.
    pub sums: *const f32,
    /// The scale of each token.
    pub row_scales: *const f32,
    /// The scale of each column.
    pub col_scales: *const f32,
    pub output: DirectOutput,
}

/// Rows written per step of a product.
pub(super) const ROWS_PER_STEP: usize = 2;

impl FinishedQuad {
    /// Prefetches the residual of the [`ROWS_PER_STEP`] rows from `first` on.
    #[inline(always)]
    pub fn prefetch(&self, first: usize) {
        if let Some(GatedResidual { residual, .. }) = self.output.gated {
            for i in first..first + ROWS_PER_STEP {
                // SAFETY: a prefetch never faults.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(residual.wrapping_add(i * self.output.stride).cast()) };
            }
        }
    }

    /// Writes the [`ROWS_PER_STEP`] rows from `first` on, with the gated residual if `GATED`. Other threads see them only
    /// after an `sfence`, which the product executes.
    ///
    /// # Safety
    /// The rows are below [`PAIR`]; sums, scales, residual, gate and output have [`PAIR`] rows and columns.
    #[inline(always)]
    pub unsafe fn write<const GATED: bool>(&self, s: Avx512, first: usize) {
        for i in first..first + ROWS_PER_STEP {
            // SAFETY: row `i` of everything, as the caller promises; the token proves the instructions.
            unsafe {
                let at = i * self.output.stride;
                let (a, b) = (self.value::<GATED>(s, i, at, 0), self.value::<GATED>(s, i, at, 16));
                s.stream_two_bf16(self.output.to.add(at), a, b);
            }
        }
    }

    /// Writes the rows from `first` on.
    ///
    /// # Safety
    /// As [`FinishedQuad::write`]; the machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub unsafe fn write_rest(&self, s: Avx512, first: usize) {
        for i in (first..PAIR).step_by(ROWS_PER_STEP) {
            // SAFETY: upheld by the caller.
            unsafe {
                if self.output.gated.is_some() {
                    self.write::<true>(s, i);
                } else {
                    self.write::<false>(s, i);
                }
            }
        }
    }

    /// 16 results of row `i`, which begins at element `at` of the output, from column `from` on.
    ///
    /// # Safety
    /// As [`FinishedQuad::write`].
    #[inline(always)]
    unsafe fn value<const GATED: bool>(&self, s: Avx512, i: usize, at: usize, from: usize) -> __m512 {
        // SAFETY: upheld by the caller; the token proves the instructions.
        unsafe {
            let sums = self.sums.add(i / 16 * (QUAD_SUMS / 2) + i % 16 * 16 + from * 16);
            let sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.cast()));
            let v = s.mul(s.mul(sums, s.splat(*self.row_scales.add(i))), s.load(self.col_scales.add(from)));
            match self.output.gated {
                Some(GatedResidual { residual, gate }) if GATED => {
                    s.fma(s.load(gate.add(from)), v, s.load_bf16(residual.add(at + from)))
                }
                _ => v,
            }
        }
    }
}

const _: () = assert!(PAIR == 32 && QUAD_SUMS == 1024);

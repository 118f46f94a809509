//! Results that are written while the tiles are at the next product.
//!
//! This has to be little work, or the products wait for it: no more than some forty instructions a row, and results that
//! pass the caches by, since fetching lines that are written whole would cost the products more than it hides.

use std::arch::x86_64::*;

use super::pack::{PAIR, SUMS};
use crate::gemm::{Onto, Plain};
use crate::simd::{Avx512, Simd};

/// The finished sums of [`PAIR`] tokens and [`PAIR`] columns, and where they go.
#[derive(Clone, Copy)]
pub(super) struct Square {
    /// Integers, as four tiles have them.
    pub sums: *const f32,
    /// The scale of each token.
    pub tokens: *const f32,
    /// The scale of each column.
    pub columns: *const f32,
    pub place: Plain,
}

/// Rows that are written in a step of a product.
pub(super) const AT_ONCE: usize = 2;

impl Square {
    /// Asks for what writing will read of the rows from `first` on.
    #[inline(always)]
    pub fn ask(&self, first: usize) {
        if let Some(Onto { residual, .. }) = self.place.onto {
            for i in first..first + AT_ONCE {
                // SAFETY: asking for memory never faults.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(residual.wrapping_add(i * self.place.stride).cast()) };
            }
        }
    }

    /// Writes [`AT_ONCE`] rows; with `ONTO` there is something to add them to. The product sees to it that others find
    /// them.
    ///
    /// # Safety
    /// The rows are below [`PAIR`]; sums, scales, residual, gate and place are there for [`PAIR`] rows and columns.
    #[inline(always)]
    pub unsafe fn write<const ONTO: bool>(&self, s: Avx512, first: usize) {
        for i in first..first + AT_ONCE {
            // SAFETY: row `i` of everything, as the caller promises; the token proves the instructions.
            unsafe {
                let at = i * self.place.stride;
                let (a, b) = (self.value::<ONTO>(s, i, at, 0), self.value::<ONTO>(s, i, at, 16));
                s.stream_two_bf16(self.place.to.add(at), a, b);
            }
        }
    }

    /// Writes the rows from `first` on.
    ///
    /// # Safety
    /// As [`Square::write`]; the machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub unsafe fn write_rest(&self, s: Avx512, first: usize) {
        for i in (first..PAIR).step_by(AT_ONCE) {
            // SAFETY: the caller's promise.
            unsafe {
                match self.place.onto {
                    Some(_) => self.write::<true>(s, i),
                    None => self.write::<false>(s, i),
                }
            }
        }
    }

    /// 16 results of row `i`, which is `at` elements from the first, from column `from` on.
    ///
    /// # Safety
    /// As [`Square::write`].
    #[inline(always)]
    unsafe fn value<const ONTO: bool>(&self, s: Avx512, i: usize, at: usize, from: usize) -> __m512 {
        // SAFETY: the caller's promise; the token proves the instructions.
        unsafe {
            let sums = self.sums.add(i / 16 * (SUMS / 2) + i % 16 * 16 + from * 16);
            let sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.cast()));
            let v = s.mul(s.mul(sums, s.splat(*self.tokens.add(i))), s.load(self.columns.add(from)));
            match self.place.onto {
                Some(Onto { residual, gate }) if ONTO => {
                    s.fma(s.load(gate.add(from)), v, s.load_bf16(residual.add(at + from)))
                }
                _ => v,
            }
        }
    }
}

const _: () = assert!(PAIR == 32 && SUMS == 1024);

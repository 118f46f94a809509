//! Vectors of AVX2.

use std::arch::x86_64::*;

use kiln_tensor::{bf16, f16};

use super::microkernel::microkernel_by_rows;
use super::{MicrokernelArgs, Simd};
use crate::isa::{Avx2, Level};

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    // 12 sums, two vectors of b and one broadcast value fill 15 of the 16 registers.
    const TILE_ROWS: usize = 6;

    #[inline(always)]
    fn level(self) -> Level {
        Level::Avx2(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm256_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m256 {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: __m256) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let bits = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
            _mm_storeu_si128(p.cast(), halves);
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m256 {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn swap_pairs(self, a: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_permute_ps::<0xb1>(a) }
    }

    #[inline(always)]
    fn mul_exp2(self, x: __m256, n: __m256) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe {
            // In two steps, so that neither power of two leaves the range of f32.
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let second = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias));
            _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))
        }
    }

    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: the token proves the instructions.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: MicrokernelArgs, rows: usize) {
        microkernel_by_rows!(self, args, rows; 1 2 3 4 5 6)
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let mut r = [_mm256_setzero_ps(); 8];
            for (i, r) in r.iter_mut().enumerate() {
                *r = _mm256_loadu_ps(from.add(i * from_stride));
            }
            // Transposes squares of 2, then of 4, in each half of 128 bits, then the halves.
            let mut t = r;
            for i in 0..4 {
                t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            for i in 0..2 {
                r[4 * i] = _mm256_shuffle_ps::<0x44>(t[4 * i], t[4 * i + 2]);
                r[4 * i + 1] = _mm256_shuffle_ps::<0xee>(t[4 * i], t[4 * i + 2]);
                r[4 * i + 2] = _mm256_shuffle_ps::<0x44>(t[4 * i + 1], t[4 * i + 3]);
                r[4 * i + 3] = _mm256_shuffle_ps::<0xee>(t[4 * i + 1], t[4 * i + 3]);
            }
            for j in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(r[j], r[4 + j]);
                let high = _mm256_permute2f128_ps::<0x31>(r[j], r[4 + j]);
                _mm256_storeu_ps(to.add(j * to_stride), low);
                _mm256_storeu_ps(to.add((4 + j) * to_stride), high);
            }
        }
    }
}

//! Vectors of AVX-512.

use std::arch::x86_64::*;

use kiln_tensor::{bf16, f16};

use super::microkernel::microkernel_by_rows;
use super::{MicrokernelArgs, Simd};
use crate::isa::{Avx512, Level};

impl Avx512 {
    /// Bits whose upper halves are the nearest bf16. Not with vcvtneps2bf16, which flushes subnormals.
    #[inline(always)]
    fn round_to_bf16(self, v: __m512) -> __m512i {
        // SAFETY: the token proves the instructions.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x1_0000));
            let sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
            let sum = _mm512_mask_add_epi32(sum, odd, sum, _mm512_set1_epi32(1));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x40_0000))
        }
    }

    /// The nearest bf16 of `a`, then those of `b`.
    #[inline(always)]
    fn to_bf16(self, a: __m512, b: __m512) -> __m512i {
        // Separates words that have a bf16 of `a` in the lower and one of `b` in the upper half.
        const ORDER: [u16; 32] = {
            let mut order = [0; 32];
            let mut i = 0;
            while i < 32 {
                order[i] = (i % 16 * 2 + i / 16) as u16;
                i += 1;
            }
            order
        };
        // SAFETY: the token proves the instructions.
        unsafe {
            let (a, b) = (_mm512_srli_epi32::<16>(self.round_to_bf16(a)), self.round_to_bf16(b));
            let both = _mm512_mask_blend_epi16(0xaaaa_aaaa, a, b);
            _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.as_ptr().cast()), both)
        }
    }
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    // 28 sums, two vectors of b and one broadcast value fill 31 of the 32 registers.
    const TILE_ROWS: usize = 14;

    #[inline(always)]
    fn level(self) -> Level {
        Level::Avx512(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: __m512) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let bits = _mm512_srli_epi32::<16>(self.round_to_bf16(v));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(bits));
        }
    }

    #[inline(always)]
    unsafe fn store_two_bf16(self, p: *mut bf16, a: __m512, b: __m512) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_storeu_si512(p.cast(), self.to_bf16(a, b)) }
    }

    #[inline(always)]
    unsafe fn stream_two_bf16(self, p: *mut bf16, a: __m512, b: __m512) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_stream_si512(p.cast(), self.to_bf16(a, b)) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m512 {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn swap_pairs(self, a: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_permute_ps::<0xb1>(a) }
    }

    #[inline(always)]
    fn mul_exp2(self, x: __m512, n: __m512) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_scalef_ps(x, n) }
    }

    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: the token proves the instructions.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: MicrokernelArgs, rows: usize) {
        microkernel_by_rows!(self, args, rows; 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from.add(i * from_stride));
            }
            for (i, column) in self.transposed(rows).into_iter().enumerate() {
                _mm512_storeu_ps(to.add(i * to_stride), column);
            }
        }
    }
}

impl Avx512 {
    /// Transposes a square of 16 rows.
    #[inline(always)]
    pub fn transposed(self, mut r: [__m512; 16]) -> [__m512; 16] {
        // SAFETY: the token proves the instructions.
        unsafe {
            // Transposes squares of 2, then of 4, in each quarter of 128 bits …
            let mut t = r;
            for i in 0..8 {
                t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            for i in 0..4 {
                r[4 * i] = _mm512_shuffle_ps::<0x44>(t[4 * i], t[4 * i + 2]);
                r[4 * i + 1] = _mm512_shuffle_ps::<0xee>(t[4 * i], t[4 * i + 2]);
                r[4 * i + 2] = _mm512_shuffle_ps::<0x44>(t[4 * i + 1], t[4 * i + 3]);
                r[4 * i + 3] = _mm512_shuffle_ps::<0xee>(t[4 * i + 1], t[4 * i + 3]);
            }
            // … then the quarters: r[4g + j] holds columns j, 4 + j, 8 + j, 12 + j of rows 4g to 4g + 3.
            for j in 0..4 {
                let low = _mm512_shuffle_f32x4::<0x88>(r[j], r[4 + j]);
                let high = _mm512_shuffle_f32x4::<0x88>(r[8 + j], r[12 + j]);
                t[j] = _mm512_shuffle_f32x4::<0x88>(low, high);
                t[8 + j] = _mm512_shuffle_f32x4::<0xdd>(low, high);
                let low = _mm512_shuffle_f32x4::<0xdd>(r[j], r[4 + j]);
                let high = _mm512_shuffle_f32x4::<0xdd>(r[8 + j], r[12 + j]);
                t[4 + j] = _mm512_shuffle_f32x4::<0x88>(low, high);
                t[12 + j] = _mm512_shuffle_f32x4::<0xdd>(low, high);
            }
            t
        }
    }
}

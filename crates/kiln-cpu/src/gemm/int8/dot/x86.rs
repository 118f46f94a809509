//! Dot products in vectors of x86-64.

use std::arch::x86_64::*;

use super::{BroadcastDot, DotSimd, microkernel};
use crate::isa::{Avx2, Avx512};
use crate::simd::WordTileArgs;

/// Two 16-bit values per word: the products of bytes would saturate.
impl DotSimd for Avx2 {
    type S = Avx2;
    type I = __m256i;
    const VALUES_PER_WORD: usize = 2;
    const UNSIGNED_WEIGHT: bool = false;
    const TILE_ROWS: usize = 6;

    #[inline(always)]
    fn simd(self) -> Avx2 {
        self
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> __m256i {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    #[inline(always)]
    fn sub_to_f32(self, a: __m256i, b: i32) -> __m256 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_cvtepi32_ps(_mm256_sub_epi32(a, _mm256_set1_epi32(b))) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, v: __m256) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            // The low bytes of each 128-bit half to its first word, then both words side by side.
            let first = _mm256_set1_epi32(0x0c08_0400);
            let halves = _mm256_shuffle_epi8(_mm256_castps_si256(v), first);
            let both = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
            _mm_storel_epi64(p.cast(), _mm256_castsi256_si128(both));
        }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: WordTileArgs) {
        // SAFETY: the trait's contract.
        unsafe { microkernel::<Self, 6>(self, args) }
    }
}

impl BroadcastDot for Avx2 {
    #[inline(always)]
    fn zero(self) -> __m256i {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> __m256i {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u32, v: __m256i) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }

    #[inline(always)]
    fn dot(self, sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)) }
    }

    #[inline(always)]
    fn add(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the token proves the instructions.
        unsafe { _mm256_add_epi32(a, b) }
    }
}

/// Proof of AVX-512 with VNNI, the dot product of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Vnni(Avx512);

impl Avx512Vnni {
    pub fn detect(avx512: Avx512) -> Option<Avx512Vnni> {
        is_x86_feature_detected!("avx512vnni").then_some(Avx512Vnni(avx512))
    }
}

impl DotSimd for Avx512Vnni {
    type S = Avx512;
    type I = __m512i;
    const VALUES_PER_WORD: usize = 4;
    const UNSIGNED_WEIGHT: bool = true;
    // 28 sums, two vectors of weights and one of an activation fill 31 of the 32 registers.
    const TILE_ROWS: usize = 14;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> __m512i {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    fn sub_to_f32(self, a: __m512i, b: i32) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_cvtepi32_ps(_mm512_sub_epi32(a, _mm512_set1_epi32(b))) }
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, v: __m512) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: WordTileArgs) {
        // SAFETY: the trait's contract.
        unsafe { microkernel::<Self, 14>(self, args) }
    }
}

impl BroadcastDot for Avx512Vnni {
    #[inline(always)]
    fn zero(self) -> __m512i {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> __m512i {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u32, v: __m512i) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }

    #[inline(always)]
    fn dot(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_dpbusd_epi32(sum, w, x) }
    }

    #[inline(always)]
    fn add(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_add_epi32(a, b) }
    }
}

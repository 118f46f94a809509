//! Vectors of NEON.

use std::arch::aarch64::*;

use kiln_tensor::{bf16, f16};

use super::microkernel::microkernel_by_rows;
use super::{MicrokernelArgs, Simd};
use crate::isa::{Level, Neon};

impl Simd for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    // 24 sums, two vectors of b and one broadcast value fill 27 of the 32 registers.
    const TILE_ROWS: usize = 12;

    #[inline(always)]
    fn level(self) -> Level {
        Level::Neon(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { vld1q_f32(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: float32x4_t) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { vst1q_f32(p, v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> float32x4_t {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast()))) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: float32x4_t) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let bits = vreinterpretq_u32_f32(v);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
            let bits = vbslq_u32(vceqq_f32(v, v), rounded, quiet);
            vst1_u16(p.cast(), vshrn_n_u32::<16>(bits));
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> float32x4_t {
        // The f16 intrinsics are not stable yet.
        let mut lanes = [0.0; 4];
        for (i, lane) in lanes.iter_mut().enumerate() {
            // SAFETY: the pointers are as the trait requires.
            *lane = unsafe { p.add(i).read_unaligned() }.to_f32();
        }
        // SAFETY: the token proves the instructions.
        unsafe { vld1q_f32(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vaddq_f32(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vsubq_f32(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vdivq_f32(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // Not vmaxq, which returns NaN if either is NaN; `b` is wanted then.
        // SAFETY: the token proves the instructions.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }

    #[inline(always)]
    fn min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }

    #[inline(always)]
    fn round(self, a: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vrndnq_f32(a) }
    }

    #[inline(always)]
    fn swap_pairs(self, a: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vrev64q_f32(a) }
    }

    #[inline(always)]
    fn mul_exp2(self, x: float32x4_t, n: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe {
            // In two steps, so that neither power of two leaves the range of f32.
            let n = vcvtq_s32_f32(n);
            let half = vshrq_n_s32::<1>(n);
            let power = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
            vmulq_f32(vmulq_f32(x, power(half)), power(vsubq_s32(n, half)))
        }
    }

    #[inline(always)]
    fn prefetch(self, _: *const f32) {
        // The intrinsic is not stable; the hardware prefetches rows by itself.
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: MicrokernelArgs, rows: usize) {
        microkernel_by_rows!(self, args, rows; 1 2 3 4 5 6 7 8 9 10 11 12)
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            let row = |i: usize| vreinterpretq_f64_f32(vld1q_f32(from.add(i * from_stride)));
            let pairs = |a, b| {
                let (a, b) = (vreinterpretq_f32_f64(a), vreinterpretq_f32_f64(b));
                [vtrn1q_f32(a, b), vtrn2q_f32(a, b)].map(|v| vreinterpretq_f64_f32(v))
            };
            let (above, below) = (pairs(row(0), row(1)), pairs(row(2), row(3)));
            for i in 0..2 {
                let low = vreinterpretq_f32_f64(vtrn1q_f64(above[i], below[i]));
                let high = vreinterpretq_f32_f64(vtrn2q_f64(above[i], below[i]));
                vst1q_f32(to.add(i * to_stride), low);
                vst1q_f32(to.add((i + 2) * to_stride), high);
            }
        }
    }
}

//! Dot products in vectors of 64-bit ARM.
//!
//! A vector holds four words of each row of the activations, and an instruction takes one of them by its lane.

use std::arch::aarch64::*;
use std::arch::asm;

use super::DotSimd;
use crate::isa::{Dotprod, I8mm, Neon};
use crate::simd::{MMLA_TILE, Simd, WordTileArgs, mmla_tile, pair_columns};

/// Rows of a register tile: 16 sums, a vector of every row and two of the weight fill 26 of the 32 registers.
const TILE_ROWS: usize = 8;

/// What the sets have in common.
macro_rules! words {
    () => {
        type S = Neon;
        type I = uint32x4_t;
        const UNSIGNED_WEIGHT: bool = false;

        #[inline(always)]
        unsafe fn load(self, p: *const u32) -> uint32x4_t {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { vld1q_u32(p) }
        }

        #[inline(always)]
        fn sub_to_f32(self, a: uint32x4_t, b: i32) -> float32x4_t {
            // SAFETY: the token proves the instructions.
            unsafe { vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(a), vdupq_n_s32(b))) }
        }

        #[inline(always)]
        unsafe fn store_bytes(self, p: *mut i8, v: float32x4_t) {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe {
                let halves = vmovn_u32(vreinterpretq_u32_f32(v));
                let bytes = vmovn_u16(vcombine_u16(halves, halves));
                p.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_u8(bytes)));
            }
        }
    };
}

/// Two 16-bit values per word. The weight's vectors hold the first values of four columns, then their second ones.
impl DotSimd for Neon {
    words!();
    const VALUES_PER_WORD: usize = 2;
    const TILE_ROWS: usize = TILE_ROWS;

    #[inline(always)]
    fn simd(self) -> Neon {
        self
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize) {
        // SAFETY: the token proves the instructions; the pointers are as the trait requires.
        unsafe {
            Simd::transpose(self, from.cast(), from_stride, to.cast(), to_stride);
            for i in 0..4 {
                let row = to.add(i * to_stride);
                let v = vreinterpretq_u16_u32(vld1q_u32(row));
                let v = vcombine_u16(vget_low_u16(vuzp1q_u16(v, v)), vget_low_u16(vuzp2q_u16(v, v)));
                vst1q_u32(row, vreinterpretq_u32_u16(v));
            }
        }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: WordTileArgs) {
        // SAFETY: the trait's contract.
        unsafe { lane_tile(self, args) }
    }
}

/// Four bytes per word.
impl DotSimd for Dotprod {
    words!();
    const VALUES_PER_WORD: usize = 4;
    const TILE_ROWS: usize = TILE_ROWS;

    #[inline(always)]
    fn simd(self) -> Neon {
        self.neon()
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: WordTileArgs) {
        // SAFETY: the trait's contract.
        unsafe { lane_tile(self, args) }
    }
}

/// Four bytes per word, multiplied two rows by two columns at a time.
impl DotSimd for I8mm {
    words!();
    const VALUES_PER_WORD: usize = 4;
    const TILE_ROWS: usize = MMLA_TILE;
    const TILE_COLS: usize = MMLA_TILE;

    #[inline(always)]
    fn simd(self) -> Neon {
        self.neon()
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize) {
        // SAFETY: the trait's contract.
        unsafe { pair_columns(from, from_stride, to, to_stride) }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: WordTileArgs) {
        // SAFETY: the trait's contract.
        unsafe { mmla_tile(self, args, MMLA_TILE) }
    }
}

/// Dot products of four columns of the weight with one word of a row.
trait LaneDot: Copy {
    /// In each lane `sum + Σ w · x` over the values of the words, where `x` is the word in lane `LANE`.
    fn dot<const LANE: i32>(self, sum: int32x4_t, w: uint32x4_t, x: uint32x4_t) -> int32x4_t;
}

impl LaneDot for Neon {
    #[inline(always)]
    fn dot<const LANE: i32>(self, sum: int32x4_t, w: uint32x4_t, x: uint32x4_t) -> int32x4_t {
        #[inline(always)]
        fn both<const FIRST: i32, const SECOND: i32>(
            sum: int32x4_t,
            w: int16x8_t,
            x: int16x8_t,
        ) -> int32x4_t {
            // SAFETY: NEON is part of the target's base instructions.
            unsafe {
                let sum = vmlal_laneq_s16::<FIRST>(sum, vget_low_s16(w), x);
                vmlal_high_laneq_s16::<SECOND>(sum, w, x)
            }
        }
        // SAFETY: the token proves the instructions.
        let (w, x) = unsafe { (vreinterpretq_s16_u32(w), vreinterpretq_s16_u32(x)) };
        match LANE {
            0 => both::<0, 1>(sum, w, x),
            1 => both::<2, 3>(sum, w, x),
            2 => both::<4, 5>(sum, w, x),
            _ => both::<6, 7>(sum, w, x),
        }
    }
}

impl LaneDot for Dotprod {
    #[inline(always)]
    fn dot<const LANE: i32>(self, mut sum: int32x4_t, w: uint32x4_t, x: uint32x4_t) -> int32x4_t {
        // SAFETY: the token proves the instruction, which touches registers alone.
        unsafe {
            // The intrinsic is not stable.
            asm!(
                "sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]",
                sum = inout(vreg) sum,
                w = in(vreg) w,
                x = in(vreg) x,
                lane = const LANE,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    }
}

/// One register tile.
///
/// # Safety
/// As [`DotSimd::microkernel`].
#[inline(always)]
unsafe fn lane_tile<D: LaneDot>(d: D, t: WordTileArgs) {
    const COLS: usize = 8;
    // SAFETY: NEON is part of the target's base instructions; four words of every row of a and four rows of b lie inside
    // what the caller promises, as the tile's rows do.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 2]; TILE_ROWS];
        for k in (0..t.depth).step_by(4) {
            let x: [uint32x4_t; TILE_ROWS] = std::array::from_fn(|i| vld1q_u32(t.a.add(i * t.a_stride + k)));
            macro_rules! steps {
                ($($lane:literal)+) => {
                    $({
                        let b = t.b.add((k + $lane) * COLS);
                        let (b0, b1) = (vld1q_u32(b), vld1q_u32(b.add(4)));
                        for (sum, &x) in sums.iter_mut().zip(&x) {
                            sum[0] = d.dot::<$lane>(sum[0], b0, x);
                            sum[1] = d.dot::<$lane>(sum[1], b1, x);
                        }
                    })+
                };
            }
            steps!(0 1 2 3);
        }
        for (i, sum) in sums.iter().enumerate() {
            for (j, &sum) in sum.iter().enumerate() {
                let (c, sum) = (t.c.add(i * t.stride + 4 * j), vreinterpretq_u32_s32(sum));
                vst1q_u32(c, if t.add { vaddq_u32(vld1q_u32(c), sum) } else { sum });
            }
        }
    }
}

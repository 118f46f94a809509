//! The matrix instructions of 64-bit ARM: two rows of eight bytes times two columns of eight bytes, into 2 × 2 sums.
//!
//! The instructions are inline assembly because the intrinsics are not stable.

use std::arch::aarch64::*;
use std::arch::asm;

use super::WordTileArgs;
use crate::isa::{Bf16, I8mm};

/// Rows and columns of the register tile: 16 vectors of sums, eight of the right operand and four of the left one fill 28
/// of the 32 registers.
pub(crate) const MMLA_TILE: usize = 8;

/// A matrix instruction; a value of the type proves that the machine has it.
pub(crate) trait Mmla: Copy {
    /// `sums + a · bᵀ`, of 2 × 2 sums, two rows of `a` and two of `b`.
    fn mmla(self, sums: uint32x4_t, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t;
    /// The sum of each lane.
    fn add(self, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t;
}

/// Makes a method of an instruction.
macro_rules! mmla {
    ($instruction:literal, $elements:literal) => {
        #[inline(always)]
        fn mmla(self, mut sums: uint32x4_t, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
            // SAFETY: the token proves the instruction, which touches registers alone.
            unsafe {
                asm!(
                    concat!($instruction, " {sums:v}.4s, {a:v}.", $elements, ", {b:v}.", $elements),
                    sums = inout(vreg) sums,
                    a = in(vreg) a,
                    b = in(vreg) b,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            sums
        }
    };
}

/// int8 with 32-bit sums: eight values of each row.
impl Mmla for I8mm {
    mmla!("smmla", "16b");

    #[inline(always)]
    fn add(self, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vaddq_u32(a, b) }
    }
}

/// bf16 with f32 sums: four values of each row.
impl Mmla for Bf16 {
    mmla!("bfmmla", "8h");

    #[inline(always)]
    fn add(self, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        // SAFETY: the token proves the instructions.
        unsafe { vreinterpretq_u32_f32(vaddq_f32(vreinterpretq_f32_u32(a), vreinterpretq_f32_u32(b))) }
    }
}

/// The lower halves of both, and the upper ones.
#[inline(always)]
fn zip_halves(a: uint32x4_t, b: uint32x4_t) -> [uint32x4_t; 2] {
    // SAFETY: NEON is part of the target's base instructions.
    unsafe {
        let (a, b) = (vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b));
        [vreinterpretq_u32_u64(vzip1q_u64(a, b)), vreinterpretq_u32_u64(vzip2q_u64(a, b))]
    }
}

/// Writes a square of 4 × 4 words of a right operand, a row for every column of the result, as [`mmla_tile`] reads it: columns
/// 0 and 1 then 2 and 3 over the first two words, then both over the last two.
///
/// # Safety
/// `from` holds four rows of four words, `from_stride` apart; `to` can take as much, `to_stride` apart.
#[inline(always)]
pub(crate) unsafe fn pair_columns(from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize) {
    // SAFETY: NEON is part of the target's base instructions; the pointers are as the caller promises.
    unsafe {
        let row = |i: usize| vld1q_u32(from.add(i * from_stride));
        let (left, right) = (zip_halves(row(0), row(1)), zip_halves(row(2), row(3)));
        for (i, v) in [left[0], right[0], left[1], right[1]].into_iter().enumerate() {
            vst1q_u32(to.add(i * to_stride), v);
        }
    }
}

/// One register tile of up to [`MMLA_TILE`] rows and [`MMLA_TILE`] columns, whose right operand was written by [`pair_columns`].
///
/// # Safety
/// `1 <= rows <= MMLA_TILE`; the operands are as [`WordTileArgs`] says, of that many rows, and `depth` is a multiple of 4.
#[inline(always)]
pub(crate) unsafe fn mmla_tile<M: Mmla>(m: M, t: WordTileArgs, rows: usize) {
    const PAIRS: usize = MMLA_TILE / 2;
    // SAFETY: NEON is part of the target's base instructions; four words of every row of a and four rows of b lie inside
    // what the caller promises, as the tile's rows do.
    unsafe {
        // A row that is missing is one that is there, whose sums are not written.
        let a: [*const u32; MMLA_TILE] = std::array::from_fn(|i| t.a.add(i.min(rows - 1) * t.a_stride));
        // For each pair of rows: columns 0 and 1, 4 and 5, 2 and 3, 6 and 7.
        let mut sums = [[vdupq_n_u32(0); PAIRS]; PAIRS];
        for k in (0..t.depth).step_by(4) {
            let b: [uint32x4_t; 2 * PAIRS] =
                std::array::from_fn(|i| vld1q_u32(t.b.add(k * MMLA_TILE + 4 * i)));
            for (i, sums) in sums.iter_mut().enumerate() {
                let [first, second] = zip_halves(vld1q_u32(a[2 * i].add(k)), vld1q_u32(a[2 * i + 1].add(k)));
                for (sum, &b) in sums.iter_mut().zip(&b[..PAIRS]) {
                    *sum = m.mmla(*sum, first, b);
                }
                for (sum, &b) in sums.iter_mut().zip(&b[PAIRS..]) {
                    *sum = m.mmla(*sum, second, b);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, halves) in
                [zip_halves(sums[0], sums[2]), zip_halves(sums[1], sums[3])].into_iter().enumerate()
            {
                for (row, sum) in (2 * i..rows).zip(halves) {
                    let c = t.c.add(row * t.stride + 4 * j);
                    vst1q_u32(c, if t.add { m.add(vld1q_u32(c), sum) } else { sum });
                }
            }
        }
    }
}

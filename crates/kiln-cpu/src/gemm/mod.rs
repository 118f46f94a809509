//! Matrix products.
//!
//! Everything that multiplies (linear layers, attention, convolutions) computes `C[i][j] = Σ_k A[i][k] · B[j][k]`. The
//! block sizes have their BLAS names: MC rows and NC columns of the result per task, [`KC`] steps of the sum at a time.
//! [`multiply`] takes two packed operands in f32:
//!
//! - the left one, `A`, row by row in blocks of [`KC`] columns, so that packing is a widening copy;
//! - the right one, `B`, in panels of `tile_cols` rows, transposed, so that one `k` of a panel is two vectors.
//!
//! The [`microkernel`] keeps a tile of `tile_rows × tile_cols` sums (MR × NR) in registers for a whole block. Blocks are
//! summed in the same order wherever a task begins.
//!
//! Each number format has its own packing and microkernel: [`gemm_f32()`], [`gemv()`] and [`gemm_small_n`] work in f32,
//! [`int8`] in integer vectors, `amx` in tiles of bf16 or int8. They share the task loop of [`blocks`] and hand their
//! sums to an [`Epilogue`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod blocks;
mod epilogue;
mod gemm_f32;
mod gemv;
mod int8;
mod low_rank;
mod pack;
mod small_n;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{
    AmxBf16Gemm, AmxInt8Gemm, Bf16Rows, PAIR, PackedInt8Weight, QUAD_SUMS, TILE_ROW_BF16, TILE_ROW_BYTES,
    TiledOperand, amx_conv_gemm, pack_left_row, pack_right_row_pair, pack_right_tiles,
};
pub(crate) use blocks::{Block, BlockGrid, ScratchSizes};
#[cfg(target_arch = "x86_64")]
pub(crate) use epilogue::{DirectOutput, GatedResidual};
pub(crate) use epilogue::{Epilogue, PREFETCH_ROWS, SumBlock, run_epilogue};
pub(crate) use gemm_f32::{MC, Orientation, Term, gemm_f32, gemm_f32_of};
pub(crate) use gemv::{GEMV_MAX_ROWS, GemvTerm, gemv};
pub(crate) use int8::{Int8Weight, gemm_int8};
pub(crate) use low_rank::PackedUpdates;
pub(crate) use pack::{PackedLeft, RowSource, pack_left, pack_right, pack_right_kn, read_row, widen_rows};
pub(crate) use small_n::{SMALL_N, SmallNOperands, gemm_small_n, padded_depth, small_n_scratch_len};

use crate::isa::Level;
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{MicrokernelArgs, Portable, Simd, dispatch};

/// Columns of one block of the left operand, and the distance between its rows.
///
/// A tile's rows (14 × 1.5 KiB with AVX-512) stay in the L1 cache while the panels of the right operand are streamed.
/// Not a power of two, which would put the rows into the same few cache sets.
pub(crate) const KC: usize = 384;

impl Level {
    /// Rows of the register tile (MR).
    pub fn tile_rows(self) -> usize {
        match self {
            Level::Portable => Portable::TILE_ROWS,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Neon::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Avx2::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) | Level::Amx(_) => Avx512::TILE_ROWS,
        }
    }

    /// Columns of the register tile (NR): the width of a panel.
    pub fn tile_cols(self) -> usize {
        match self {
            Level::Portable => Portable::TILE_COLS,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Neon::TILE_COLS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Avx2::TILE_COLS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) | Level::Amx(_) => Avx512::TILE_COLS,
        }
    }
}

/// One register tile of `ROWS` rows.
///
/// # Safety
/// As [`Simd::microkernel`] with `rows = ROWS`.
#[inline(always)]
pub(crate) unsafe fn microkernel<S: Simd, const ROWS: usize>(s: S, t: MicrokernelArgs) {
    /// f32 values of a cache line.
    const LINE: usize = 16;
    let mut sums = [[s.splat(0.0); 2]; ROWS];
    for i in 0..ROWS {
        s.prefetch(t.c.wrapping_add(i * t.stride));
        s.prefetch(t.c.wrapping_add(i * t.stride + LINE));
    }
    for k in 0..t.depth {
        s.prefetch(t.next.wrapping_add(k * LINE));
        // SAFETY: row k of b and column k of a lie inside what the caller promises.
        unsafe {
            let b = t.b.add(k * S::TILE_COLS);
            let (b0, b1) = (s.load(b), s.load(b.add(S::LANES)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let a = s.splat(*t.a.add(i * KC + k));
                sum[0] = s.fma(a, b0, sum[0]);
                sum[1] = s.fma(a, b1, sum[1]);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        for (j, &sum) in sum.iter().enumerate() {
            // SAFETY: the tile's row i lies inside what the caller promises.
            unsafe {
                let c = t.c.add(i * t.stride + j * S::LANES);
                s.store(c, if t.add { s.add(s.load(c), sum) } else { sum });
            }
        }
    }
}

/// The sizes of one [`multiply`].
#[derive(Clone, Copy)]
pub(crate) struct GemmSize {
    /// Rows of the left operand.
    pub rows: usize,
    /// Panels of the right operand.
    pub panels: usize,
    /// Summed columns, at most [`KC`].
    pub depth: usize,
    /// Distance between the rows of the result.
    pub stride: usize,
}

#[inline(always)]
fn multiply_kernel<S: Simd>(s: S, size: GemmSize, a: &[f32], b: &[f32], c: &mut [f32], add: bool) {
    let GemmSize { rows, panels, depth, stride } = size;
    if rows == 0 || panels == 0 {
        return;
    }
    assert!(depth <= KC && a.len() >= (rows - 1) * KC + depth);
    assert!(b.len() >= panels * depth * S::TILE_COLS);
    assert!(stride >= panels * S::TILE_COLS && c.len() >= (rows - 1) * stride + panels * S::TILE_COLS);
    let mut row = 0;
    while row < rows {
        let count = S::TILE_ROWS.min(rows - row);
        for panel in 0..panels {
            // SAFETY: the lengths were checked above; count is 1 to TILE_ROWS.
            unsafe {
                let a_rows = a.as_ptr().add(row * KC);
                // The next rows come from memory; the panels are still in the cache since they were packed.
                let next = if panel == 0 { a_rows.wrapping_add(count * KC) } else { a_rows };
                let args = MicrokernelArgs {
                    a: a_rows,
                    next,
                    b: b.as_ptr().add(panel * depth * S::TILE_COLS),
                    c: c.as_mut_ptr().add(row * stride + panel * S::TILE_COLS),
                    depth,
                    stride,
                    add,
                };
                s.microkernel(args, count);
            }
        }
        row += count;
    }
}

dispatch! {
    /// Writes (or with `add` adds) to `c` the product of a block of the left operand and panels of the right one.
    pub(crate) fn multiply(size: GemmSize, a: &[f32], b: &[f32], c: &mut [f32], add: bool) => multiply_kernel;
}

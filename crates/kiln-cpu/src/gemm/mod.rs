//! Matrix products.
//!
//! Everything that multiplies (linear layers, attention, convolutions) computes `C[i][j] = Σ_k A[i][k] · B[j][k]`. The
//! block sizes have their BLAS names: MC rows and NC columns of the result per task, `KC` steps of the sum at a time.
//! The product of a [`PackedFormat`] takes two packed operands:
//!
//! - the left one, `A`, row by row in blocks of `KC` columns, so that packing is a widening copy;
//! - the right one, `B`, in panels of `tile_cols` rows, transposed, so that one `k` of a panel is two vectors of f32.
//!
//! The microkernel keeps a tile of `tile_rows × tile_cols` sums (MR × NR) in registers for a whole block. Blocks are
//! summed in the same order wherever a task begins.
//!
//! Each number format has its own packing and microkernel: [`gemm_packed`] works in f32 or, with ARM's matrix instructions,
//! bf16; [`gemv()`] and [`gemm_small_n`] in f32, [`int8`] in integer vectors, `amx` in tiles of bf16 or int8. They share the
//! task loop of [`blocks`] and hand their sums to an [`Epilogue`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod blocks;
mod epilogue;
mod format;
mod gemm_packed;
mod gemv;
mod int8;
mod low_rank;
mod multiply;
#[cfg(target_arch = "aarch64")]
mod neon_bf16;
mod pack;
mod packed_left;
mod rows;
mod small_n;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::{
    AmxBf16Gemm, AmxInt8Gemm, PAIR, PackedInt8Weight, QUAD_SUMS, TILE_ROW_BF16, TILE_ROW_BYTES, TiledOperand,
    amx_conv_gemm, pack_left_row, pack_right_row_pair, pack_right_tiles,
};
pub(crate) use blocks::{Block, BlockGrid, ScratchSizes};
#[cfg(target_arch = "x86_64")]
pub(crate) use epilogue::{DirectOutput, GatedResidual};
pub(crate) use epilogue::{Epilogue, PREFETCH_ROWS, SumBlock, run_epilogue};
pub(crate) use format::PackedFormat;
pub(crate) use gemm_packed::{MC, Orientation, PackedGemm};
pub(crate) use gemv::{GEMV_MAX_ROWS, GemvTerm, gemv};
pub(crate) use int8::gemm_int8;
pub(crate) use low_rank::PackedUpdates;
pub(crate) use multiply::GemmSize;
pub(crate) use pack::{read_row, widen_rows};
pub(crate) use packed_left::{PackedLeft, Term};
#[cfg(target_arch = "x86_64")]
pub(crate) use rows::Bf16Rows;
pub(crate) use rows::RowSource;
#[cfg(target_arch = "aarch64")]
pub(crate) use rows::round_row_bf16;
pub(crate) use small_n::{SMALL_N, SmallNOperands, gemm_small_n, padded_depth, small_n_scratch_len};

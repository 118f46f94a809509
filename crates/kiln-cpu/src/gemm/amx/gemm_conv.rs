//! Convolutions of bf16 in AMX tiles: the right operand, the kernel, is small and packed as a whole.
//!
//! The left operand is packed one [`PAIR`] of rows at a time and used at once, so that a convolution's patches are never
//! stored as a whole; sums come out row by row.

use std::ops::Range;

use kiln_ops::Result;
use kiln_tensor::bf16;

use super::operand::TiledOperand;
use super::pack::pack_left_row;
use super::sizes::{KC_BYTES, PAIR, QUAD_SUMS, TILE_ROW_BYTES};
use crate::Context;
use crate::gemm::blocks::{Block, BlockGrid, ScratchSizes};
use crate::gemm::{Bf16Rows, Epilogue, SumBlock, run_epilogue};
use crate::isa::Amx;
use crate::simd::{Bf16Tiles, LeftOperand, TileOperands};

/// Maximum rows of a strip.
const MAX_STRIP_ROWS: usize = 1024;

/// Computes the first `rows` rows of `left · rightᵀ`.
pub(crate) fn amx_conv_gemm<E: Epilogue>(
    cx: &Context,
    amx: Amx,
    left: &impl Bf16Rows,
    rows: usize,
    right: &TiledOperand,
    epilogue: &E,
) -> Result<()> {
    let cols = right.rows.len();
    let pairs = cols.div_ceil(PAIR);
    let stride = pairs * PAIR;
    let grid = BlockGrid::row_strips(cx.pool.threads(), [rows, cols], stride, PAIR, MAX_STRIP_ROWS);
    let scratch = ScratchSizes {
        packed: PAIR * KC_BYTES,
        tile_sums: grid.block_rows * stride,
        sums: PAIR * stride,
        ..ScratchSizes::default()
    };
    grid.run(cx, scratch, |task, scratch| {
        let Block { rows, .. } = task.block;
        let mut tiles = amx.configure_tiles();
        for from in (0..right.depth).step_by(KC_BYTES) {
            let depth = from..right.depth.min(from + KC_BYTES);
            let steps = depth.len().div_ceil(TILE_ROW_BYTES);
            let row_quads = scratch.tile_sums.chunks_exact_mut(pairs * QUAD_SUMS);
            for (row, quads) in rows.clone().step_by(PAIR).zip(row_quads) {
                // SAFETY: the token proves AVX-512.
                unsafe { pack_pair(left, row..rows.end, depth.clone(), &mut scratch.packed) };
                for (pair, sums) in quads.chunks_exact_mut(QUAD_SUMS).enumerate() {
                    let a = LeftOperand::Tiles(scratch.packed.as_ptr());
                    let b = right.tiles(from, pair).as_ptr();
                    let operands = TileOperands { a, b, c: sums.as_mut_ptr().cast(), steps, add: from > 0 };
                    // SAFETY: two tiles per step in the packed rows and in b, four tiles of sums.
                    unsafe { tiles.multiply::<Bf16Tiles>(operands, |_| ()) };
                }
            }
        }
        drop(tiles);
        let row_quads = scratch.tile_sums.chunks_exact(pairs * QUAD_SUMS);
        for (row, quads) in rows.clone().step_by(PAIR).zip(row_quads) {
            // SAFETY: the token proves AVX-512.
            unsafe { quads_to_rows(quads, &mut scratch.sums) };
            let rows = row..rows.end.min(row + PAIR);
            let sums = SumBlock { rows, cols: right.rows.clone(), sums: &scratch.sums, stride };
            run_epilogue(cx.level, epilogue, sums);
        }
    })
}

/// Packs bytes `depth` of up to [`PAIR`] rows as left tiles, with zeros for rows that are missing.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pack_pair(left: &impl Bf16Rows, rows: Range<usize>, depth: Range<usize>, out: &mut [u8]) {
    let mut line = [bf16::ZERO; KC_BYTES / 2];
    for i in 0..PAIR {
        let inside = if rows.start + i < rows.end { depth.len() / 2 } else { 0 };
        left.copy_row(rows.start + i, depth.start / 2, &mut line[..inside]);
        pack_left_row(bytemuck::cast_slice(&line[..inside]), i, depth.len().div_ceil(TILE_ROW_BYTES), out);
    }
}

/// Writes quads of sums that lie side by side as [`PAIR`] rows.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn quads_to_rows(quads: &[f32], out: &mut [f32]) {
    let stride = quads.len() / PAIR;
    for (pair, quad) in quads.chunks_exact(QUAD_SUMS).enumerate() {
        for (tile, values) in quad.chunks_exact(256).enumerate() {
            for (i, values) in values.chunks_exact(16).enumerate() {
                let at = (tile / 2 * 16 + i) * stride + pair * PAIR + tile % 2 * 16;
                out[at..at + 16].copy_from_slice(values);
            }
        }
    }
}

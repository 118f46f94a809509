//! Attention in 8 bits on Hopper for heads of 128: the operands are rounded, then multiplied.

use kiln_ops::Result;

use super::attention_hopper::{DIM, Shares, supports as supports_hopper};
use crate::context::Context;
use crate::kernels::{AttentionArgs, HeadNorms, HopperAttentionArgs, RoundAttentionArgs, kernels};
use crate::sys::driver::{DevicePtr, TensorMap};
use crate::tensor_map::MapElement;

kernels! {
    "attention_8bit" {
        RoundAttention(args: RoundAttentionArgs):
            MEASURE_KEYS_VALUES = "measure_keys_values", ROUND_ATTENTION = "round_attention";
    }
    "attention_8bit_unnormed" {
        RoundUnnormed(args: RoundAttentionArgs):
            MEASURE_UNNORMED = "measure_unnormed", ROUND_UNNORMED = "round_unnormed";
    }
    "attention_hopper_8bit" {
        AttentionHopper8Bit(args: HopperAttentionArgs):
            ATTENTION_HOPPER_8BIT = "attention_hopper_8bit";
    }
}

/// Rows of a tile and threads, as in `tile_rounding.cuh`.
const ROWS: usize = 128;
const ROUND_THREADS: usize = 256;
/// Tiles that a block measures, as there.
const MEASURED: usize = 4;
/// Heads of queries that a block rounds, as in `attention_8bit_unnormed.cu`.
const SHARED_HEADS: usize = 4;
/// Warpgroups with 64 queries each, tiles of keys in shared memory and threads, as in `attention_hopper_8bit.cu`.
const CONSUMERS: usize = 3;
const DEPTH: usize = 4;
const THREADS: usize = 128 * (CONSUMERS + 1);
/// Bytes of shared memory: two tiles of queries, keys and values, barriers, and alignment to 1024.
const SHARED: usize = (2 * 64 * CONSUMERS + 2 * DEPTH * ROWS) * DIM as usize + 256 + 1024;

/// Whether the kernels take these arguments on this GPU.
pub(super) fn supports(cx: &Context, args: &AttentionArgs) -> bool {
    supports_hopper(cx, args) && args.lse == 0
}

/// What norms and rotates queries and keys on the way, of each of their segments.
pub(super) struct QkNorms {
    pub q: HeadNorms,
    pub k: HeadNorms,
    pub eps: f32,
}

/// Runs the attention; queries and keys come unnormed if there are `norms`.
pub(super) fn run(cx: &Context, args: &AttentionArgs, norms: Option<&QkNorms>) -> Result<()> {
    let [queries, keys, heads, kv_heads] =
        [args.queries, args.keys, args.heads, args.kv_heads].map(|n| n as usize);
    let (dim, tiles) = (DIM as usize, keys.div_ceil(ROWS));
    let parts = tiles.div_ceil(MEASURED);
    let measured = cx.allocate(2 * kv_heads * parts * dim * 4)?;
    let scales = cx.allocate((heads * queries + kv_heads * tiles + kv_heads * dim) * 4)?;
    let q = cx.allocate(queries * heads * dim)?;
    let k = cx.allocate(keys * kv_heads * dim)?;
    let v = cx.allocate(tiles * ROWS * kv_heads * dim)?;
    let sums = measured.ptr(cx);
    let q_scales = scales.ptr(cx);
    let k_scales = q_scales + (4 * heads * queries) as u64;
    let rounding = RoundAttentionArgs {
        q: args.q,
        k: args.k,
        v: args.v,
        q_norms: norms.map_or(HeadNorms::default(), |norms| norms.q),
        k_norms: norms.map_or(HeadNorms::default(), |norms| norms.k),
        queries: args.queries,
        keys: args.keys,
        heads: args.heads,
        kv_heads: args.kv_heads,
        sums,
        maxima: sums + (4 * kv_heads * parts * dim) as u64,
        q_out: q.ptr(cx),
        k_out: k.ptr(cx),
        v_out: v.ptr(cx),
        q_scales,
        k_scales,
        v_scales: k_scales + (4 * kv_heads * tiles) as u64,
        eps: norms.map_or(0.0, |norms| norms.eps),
        unused: 0,
    };
    let (measured_parts, row_tiles) = ([parts, 2 * kv_heads], tiles.max(queries.div_ceil(ROWS)));
    if norms.is_some() {
        let parameters = RoundUnnormed { args: rounding };
        cx.launch(MEASURE_UNNORMED, measured_parts, ROUND_THREADS, 0, &parameters)?;
        let grid = [row_tiles, heads.div_ceil(SHARED_HEADS) + 2 * kv_heads];
        cx.launch(ROUND_UNNORMED, grid, ROUND_THREADS, 0, &parameters)?;
    } else {
        let parameters = RoundAttention { args: rounding };
        cx.launch(MEASURE_KEYS_VALUES, measured_parts, ROUND_THREADS, 0, &parameters)?;
        cx.launch(ROUND_ATTENTION, [row_tiles, heads + 2 * kv_heads], ROUND_THREADS, 0, &parameters)?;
    }

    let map = |at: DevicePtr, width: usize, rows: usize, tile: usize| -> Result<_> {
        let map = cx.driver().encode_tensor_map(MapElement::Byte, at, [width, rows], [width], [tile]);
        let mut maps = [TensorMap::NONE; _];
        maps[0] = cx.check(map)?;
        Ok(maps)
    };
    let shares = Shares::new(cx, args, [queries.div_ceil(64 * CONSUMERS), tiles], CONSUMERS)?;
    let mut parameters = HopperAttentionArgs {
        q: map(rounding.q_out, heads * dim, queries, 64)?,
        k: map(rounding.k_out, kv_heads * dim, keys, ROWS)?,
        v: map(rounding.v_out, tiles * ROWS, kv_heads * dim, dim)?,
        q_scales,
        k_scales,
        v_scales: rounding.v_scales,
        ..shares.arguments(cx, args)?
    };
    // The rounded rows of all blocks are one matrix.
    (parameters.query_segments, parameters.key_segments) = (1, 1);
    (parameters.query_end[0], parameters.key_end[0]) = (args.queries, args.keys);
    cx.launch(
        ATTENTION_HOPPER_8BIT,
        [shares.blocks, 1],
        THREADS,
        SHARED,
        &AttentionHopper8Bit { args: parameters },
    )
}

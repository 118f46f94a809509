//! Attention of few wide heads over many keys (the autoencoder's) as two matrix products per chunk of queries. On Hopper
//! `attention_wide.cu` computes the first one and its exponentials; elsewhere `softmax.cu` runs between them.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::gemm::GemmShape;
use crate::gemm::Operands;
use crate::kernels::{AttentionArgs, WideScoresArgs, kernels};
use crate::sys::driver::DevicePtr;
use crate::tensor_map::MapElement;

kernels! {
    "attention_wide" {
        AttentionWideScores(args: WideScoresArgs):
            ATTENTION_WIDE_SCORES = "attention_wide_scores";
    }
    "softmax" {
        SoftmaxRows(x: DevicePtr, out: DevicePtr, n: i32):
            SOFTMAX_ROWS = "softmax_rows" by dtype;
    }
}

/// Bytes of scores per chunk for bf16: they should stay in the L2 cache until they are used.
const SCORE_BYTES_BF16: usize = 32 << 20;
/// The same for f32, whose products are much slower than memory: enough rows to fill the GPU.
const SCORE_BYTES_F32: usize = 128 << 20;
/// Minimum keys for which separate launches pay off.
const MIN_KEYS: i32 = 512;

/// Queries of a block and keys of a tile, blocks of a cluster, elements of a step, stages and threads, as in
/// `attention_wide.cu`; the widest head whose queries fit into shared memory.
const HOPPER_QUERIES: usize = 128;
const HOPPER_KEYS: usize = 256;
const CLUSTER: usize = 2;
const STEP: usize = 64;
const STAGES: usize = 3;
const HOPPER_THREADS: usize = 384;
const MAX_HOPPER_DIM: i32 = 512;
/// Bytes of probabilities per chunk on Hopper: enough queries to fill the GPU.
const HOPPER_SCORE_BYTES: usize = 2 << 30;

/// Shapes of the two products of one head and chunk: scores, and weighted values.
fn gemm_shapes(args: &AttentionArgs, dtype: DType, rows: usize) -> [GemmShape; 2] {
    let (keys, dim) = (args.keys as usize, args.head_dim as usize);
    let (width, kv_width) = (args.heads as usize * dim, args.kv_heads as usize * dim);
    let packed = GemmShape::packed([rows, keys, dim], dtype, DType::F32, false);
    let scores = GemmShape { ldx: width, ldw: kv_width, ..packed };
    let values = GemmShape {
        k: keys,
        n: dim,
        ldx: keys,
        ldadd: width,
        ldo: width,
        out_dtype: dtype,
        w_is_k_by_n: true,
        ..scores
    };
    [scores, values]
}

/// Whether it takes these arguments: one segment each, no mask, wide heads, aligned.
pub(super) fn supports(cx: &Context, args: &AttentionArgs, dtype: DType) -> bool {
    let whole = [args.q, args.k, args.v].iter().all(|s| s.count == 1);
    let large = args.head_dim >= 256 && args.keys >= MIN_KEYS && args.mask == 0;
    let operands = Operands::new(args.q.start[0], args.k.start[0], args.out);
    whole
        && large
        && args.lse == 0
        && gemm_shapes(args, dtype, 1).iter().all(|shape| cx.shared().gemm.supports(cx, shape, &operands))
}

/// Whether `attention_wide.cu` takes these arguments, which [`supports`] has accepted, on this GPU.
fn supports_hopper(cx: &Context, args: &AttentionArgs, dtype: DType) -> bool {
    cx.gpu().capability == (9, 0)
        && dtype == DType::BF16
        && args.head_dim <= MAX_HOPPER_DIM
        && args.head_dim % STEP as i32 == 0
        && args.keys % 8 == 0
}

fn run_hopper(cx: &Context, args: &AttentionArgs) -> Result<()> {
    let (queries, keys, dim) = (args.queries as usize, args.keys as usize, args.head_dim as usize);
    let (width, kv_width) = (args.heads as usize * dim, args.kv_heads as usize * dim);
    let cluster_rows = CLUSTER * HOPPER_QUERIES;
    let chunk_rows = (HOPPER_SCORE_BYTES / (2 * keys) / cluster_rows).max(1) * cluster_rows;
    let scores = cx.allocate(chunk_rows.min(queries) * keys * 2)?;
    let inverse_sums = cx.allocate(chunk_rows.min(queries) * 4)?;
    let steps = dim / STEP;
    let shared = 2 * STEP * (steps * HOPPER_QUERIES + STAGES * HOPPER_KEYS) + 16 * STAGES + 8 + 1024;
    for head in 0..args.heads as usize {
        let kv_column = (2 * (head / (args.heads / args.kv_heads) as usize) * dim) as DevicePtr;
        let k_map = cx.driver().encode_tensor_map(
            MapElement::Bf16,
            args.k.start[0] + kv_column,
            [dim, keys, 1],
            [kv_width, keys * kv_width],
            [HOPPER_KEYS / CLUSTER, 1],
        );
        let k = cx.check(k_map)?;
        for first in (0..queries).step_by(chunk_rows) {
            let rows = chunk_rows.min(queries - first);
            let at = (2 * (first * width + head * dim)) as DevicePtr;
            let q_map = cx.driver().encode_tensor_map(
                MapElement::Bf16,
                args.q.start[0] + at,
                [dim, rows],
                [width],
                [HOPPER_QUERIES],
            );
            let score_args = WideScoresArgs {
                q: cx.check(q_map)?,
                k,
                out: scores.ptr(cx),
                inverse_sums: inverse_sums.ptr(cx),
                queries: int("attention", rows)?,
                keys: args.keys,
                steps: steps as i32,
                scale: args.scale,
            };
            let blocks = rows.div_ceil(cluster_rows) * CLUSTER;
            let parameters = AttentionWideScores { args: score_args };
            cx.launch(ATTENTION_WIDE_SCORES, [blocks, 1], HOPPER_THREADS, shared, &parameters)?;
            let value_operands = Operands {
                scales: Some([0, inverse_sums.ptr(cx)]),
                ..Operands::new(scores.ptr(cx), args.v.start[0] + kv_column, args.out + at)
            };
            let [_, value_shape] = gemm_shapes(args, DType::BF16, rows);
            cx.check(cx.shared().gemm.run(cx, &value_shape, &value_operands))?;
        }
    }
    Ok(())
}

pub(super) fn run(cx: &Context, args: &AttentionArgs, dtype: DType) -> Result<()> {
    if supports_hopper(cx, args, dtype) {
        return run_hopper(cx, args);
    }
    let gemm = &cx.shared().gemm;
    let (keys, dim) = (args.keys as usize, args.head_dim as usize);
    let queries = args.queries as usize;
    let chunk = if dtype == DType::BF16 { SCORE_BYTES_BF16 } else { SCORE_BYTES_F32 };
    let chunk_rows = (chunk / (4 * keys)).clamp(64, queries.max(64));
    let scores = cx.allocate(chunk_rows * keys * 4)?;
    // f32 probabilities overwrite their scores.
    let rounded = (dtype == DType::BF16).then(|| cx.allocate(chunk_rows * keys * 2)).transpose()?;
    let probabilities = rounded.as_ref().unwrap_or(&scores);
    for head in 0..args.heads as usize {
        let column = |head: usize| (dtype.size() * head * dim) as DevicePtr;
        let kv_column = column(head / (args.heads / args.kv_heads) as usize);
        for first in (0..queries).step_by(chunk_rows) {
            let rows = chunk_rows.min(queries - first);
            let at = column(head + first * args.heads as usize);
            let [score_shape, value_shape] = gemm_shapes(args, dtype, rows);
            let score_operands = Operands {
                alpha: args.scale,
                ..Operands::new(args.q.start[0] + at, args.k.start[0] + kv_column, scores.ptr(cx))
            };
            cx.check(gemm.run(cx, &score_shape, &score_operands))?;
            let parameters =
                SoftmaxRows { x: scores.ptr(cx), out: probabilities.ptr(cx), n: int("attention", keys)? };
            cx.launch(SOFTMAX_ROWS.of(dtype), [rows, 1], 256, 0, &parameters)?;
            let value_operands =
                Operands::new(probabilities.ptr(cx), args.v.start[0] + kv_column, args.out + at);
            cx.check(gemm.run(cx, &value_shape, &value_operands))?;
        }
    }
    Ok(())
}

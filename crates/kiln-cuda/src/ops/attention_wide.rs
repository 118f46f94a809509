//! Attention of few wide heads over many keys (the autoencoder's) as two matrix products per chunk of queries, with
//! `softmax.cu` between them.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::gemm::GemmShape;
use crate::gemm::Operands;
use crate::kernels::{AttentionArgs, kernels};
use crate::sys::driver::DevicePtr;

kernels! {
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

/// Shapes of the two products of one head and chunk: scores, and weighted values.
fn gemm_shapes(args: &AttentionArgs, dtype: DType, rows: usize) -> [GemmShape; 2] {
    let (keys, dim) = (args.keys as usize, args.head_dim as usize);
    let (width, kv_width) = (args.heads as usize * dim, args.kv_heads as usize * dim);
    let scores = GemmShape {
        rows,
        k: dim,
        n: keys,
        ldx: width,
        ldw: kv_width,
        ldadd: keys,
        ldo: keys,
        dtype,
        out_dtype: DType::F32,
        add: false,
        batch: 1,
        stride_w: 0,
        stride_out: 0,
        w_is_k_by_n: false,
        x_is_k_by_rows: false,
    };
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
    let operands = Operands {
        w: args.k.start[0],
        x: args.q.start[0],
        add: None,
        out: args.out,
        alpha: 1.0,
        bias: None,
        scales: None,
    };
    whole
        && large
        && args.lse == 0
        && gemm_shapes(args, dtype, 1).iter().all(|shape| cx.shared().gemm.supports(cx, shape, &operands))
}

pub(super) fn run(cx: &Context, args: &AttentionArgs, dtype: DType) -> Result<()> {
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
                w: args.k.start[0] + kv_column,
                x: args.q.start[0] + at,
                add: None,
                out: scores.ptr(cx),
                alpha: args.scale,
                bias: None,
                scales: None,
            };
            cx.check(gemm.run(cx, &score_shape, &score_operands))?;
            let parameters =
                SoftmaxRows { x: scores.ptr(cx), out: probabilities.ptr(cx), n: int("attention", keys)? };
            cx.launch(SOFTMAX_ROWS.of(dtype), [rows, 1], 256, 0, &parameters)?;
            let value_operands = Operands {
                w: args.v.start[0] + kv_column,
                x: probabilities.ptr(cx),
                out: args.out + at,
                alpha: 1.0,
                ..score_operands
            };
            cx.check(gemm.run(cx, &value_shape, &value_operands))?;
        }
    }
    Ok(())
}

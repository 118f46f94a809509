//! Gradients of attention on Hopper for heads of 128, with TMA and wgmma.

use kiln_ops::shapes::AttentionSize;
use kiln_ops::{AttentionMask, AttentionSpec, Result, Tensor as _};
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::kernels::{
    ATTENTION_BACKWARD_KV_HOPPER, ATTENTION_BACKWARD_Q_HOPPER, ATTENTION_STATS, AttentionBackwardHopper,
    AttentionStats, HopperAttentionBackwardArgs,
};
use crate::ops::THREADS;
use crate::ops::movement::concat_rows;
use crate::sys::driver::TensorMap;
use crate::tensor::CudaTensor;

/// Tile sizes, stages and threads, as in `attention_backward_hopper.cu`.
const DIM: usize = 128;
const ROWS: usize = 128;
const KEY_ROWS: usize = 128;
const KEY_STAGES: usize = 2;
const QUERY_ROWS: usize = 64;
const QUERY_STAGES: usize = 4;
const BLOCK_THREADS: usize = 384;
/// Bytes of a row, and of barriers and alignment to 1024.
const ROW_BYTES: usize = 2 * DIM;
const EXTRA: usize = 128 + 1024;
/// Shared memory: a block's own two tiles, and stages of two tiles; for keys also the statistics of their queries.
const SHARED_Q: usize = (2 * ROWS + 2 * KEY_STAGES * KEY_ROWS) * ROW_BYTES + EXTRA;
const SHARED_KV: usize =
    (2 * ROWS + 2 * QUERY_STAGES * QUERY_ROWS) * ROW_BYTES + QUERY_STAGES * QUERY_ROWS * 8 + EXTRA;

/// Whether the kernels take this attention on this GPU.
pub(super) fn supports(cx: &Context, size: &AttentionSize, dtype: DType, spec: &AttentionSpec) -> bool {
    cx.gpu().capability == (9, 0)
        && dtype == DType::BF16
        && size.head_dim == DIM
        && size.heads == size.kv_heads
        && spec.mask == AttentionMask::None
        && size.queries > 0
        && size.keys > 0
}

pub(super) fn backward(
    cx: &Context,
    dout: &[&CudaTensor],
    [q, k, v]: [&[&CudaTensor]; 3],
    out: &CudaTensor,
    lse: &CudaTensor,
    size: &AttentionSize,
) -> Result<[CudaTensor; 3]> {
    let [dout, q, k, v] = [dout, q, k, v].map(|blocks| whole(cx, blocks));
    let (dout, q, k, v) = (dout?, q?, k?, v?);
    let width = size.heads * DIM;
    let [dq, dk, dv] =
        [size.queries, size.keys, size.keys].map(|n| CudaTensor::new(cx, [n, width], DType::BF16));
    let (dq, dk, dv) = (dq?, dk?, dv?);
    let padded = size.queries.next_multiple_of(ROWS);
    let stats = cx.allocate(4 * 2 * size.heads * padded)?;
    let number = |n: usize| int("attention_backward", n);
    let (queries, heads) = (number(size.queries)?, number(size.heads)?);
    let parameters = AttentionStats {
        dout: dout.ptr(cx),
        out: out.ptr(cx),
        lse: lse.ptr(cx),
        stats: stats.ptr(cx),
        queries,
        heads,
        padded: number(padded)?,
    };
    cx.launch(ATTENTION_STATS, [(32 * padded * size.heads).div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    let map = |x: &CudaTensor, tile: usize| -> Result<TensorMap> {
        let rows = x.shape().rows();
        cx.check(cx.driver().encode_tensor_map(x.ptr(cx), [width, rows], [width], [tile]))
    };
    let args = |query_rows: usize, key_rows: usize| -> Result<AttentionBackwardHopper> {
        let args = HopperAttentionBackwardArgs {
            q: map(&q, query_rows)?,
            k: map(&k, key_rows)?,
            v: map(&v, key_rows)?,
            dout: map(&dout, query_rows)?,
            stats: stats.ptr(cx),
            dq: dq.ptr(cx),
            dk: dk.ptr(cx),
            dv: dv.ptr(cx),
            queries,
            keys: number(size.keys)?,
            heads,
            padded: number(padded)?,
            scale: 1.0 / (DIM as f32).sqrt(),
            unused: [0; 3],
        };
        Ok(AttentionBackwardHopper { args })
    };
    let grid = |rows: usize| [rows.div_ceil(ROWS), size.heads];
    let of_queries = args(ROWS, KEY_ROWS)?;
    cx.launch(ATTENTION_BACKWARD_Q_HOPPER, grid(size.queries), BLOCK_THREADS, SHARED_Q, &of_queries)?;
    let of_keys = args(QUERY_ROWS, ROWS)?;
    cx.launch(ATTENTION_BACKWARD_KV_HOPPER, grid(size.keys), BLOCK_THREADS, SHARED_KV, &of_keys)?;
    Ok([dq, dk, dv])
}

/// Row blocks as one aligned tensor.
fn whole(cx: &Context, blocks: &[&CudaTensor]) -> Result<CudaTensor> {
    match blocks {
        [one] if one.is_aligned() => Ok((*one).clone()),
        _ => concat_rows(cx, blocks),
    }
}

//! Attention of a few wide heads over many keys as two matrix products, some queries at a time: the autoencoder's.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::gemm::Size;
use crate::gemm::lt::{Lt, Operands};
use crate::kernels::{Attention, SOFTMAX_ROWS_BF16, SOFTMAX_ROWS_F32, SoftmaxRows};
use crate::sys::driver::DevicePtr;

/// Bytes of scores that are made at a time for bf16: they should not leave the cache before they are used.
const CHUNK: usize = 32 << 20;
/// The same for f32, whose products take far longer than moving scores does: enough rows to fill the GPU.
const CHUNK_F32: usize = 128 << 20;
/// Keys from which on products are worth their launches.
const LEAST_KEYS: i32 = 512;

/// The products of one head's chunk: scores, and what they make of the values.
fn sizes(call: &Attention, dtype: DType, rows: usize) -> [Size; 2] {
    let (keys, dim) = (call.keys as usize, call.head_dim as usize);
    let (width, kv_width) = (call.heads as usize * dim, call.kv_heads as usize * dim);
    let scores = Size {
        rows,
        k: dim,
        n: keys,
        ldx: width,
        ldw: kv_width,
        ldadd: keys,
        ldo: keys,
        dtype,
        out: DType::F32,
        add: false,
        batch: 1,
        stride_w: 0,
        stride_out: 0,
        columns: false,
    };
    let values =
        Size { k: keys, n: dim, ldx: keys, ldadd: width, ldo: width, out: dtype, columns: true, ..scores };
    [scores, values]
}

/// Whether products are the way: one run of queries, keys and values each, no mask, wide heads, whole vectors.
pub(super) fn takes(cx: &Context, call: &Attention, dtype: DType) -> bool {
    let whole = [call.q, call.k, call.v].iter().all(|s| s.count == 1);
    let large = call.head_dim >= 256 && call.keys >= LEAST_KEYS && call.mask == 0;
    let operands = Operands {
        w: call.k.start[0],
        x: call.q.start[0],
        add: None,
        out: call.out,
        alpha: 1.0,
        scales: None,
    };
    whole
        && large
        && cx.shared().lt.is_ok()
        && sizes(call, dtype, 1).iter().all(|size| Lt::takes(size, &operands))
}

pub(super) fn run(cx: &Context, call: &Attention, dtype: DType) -> Result<()> {
    let Ok(lt) = &cx.shared().lt else { return Ok(()) };
    let (keys, dim) = (call.keys as usize, call.head_dim as usize);
    let queries = call.queries as usize;
    let (chunk, softmax) = match dtype {
        DType::BF16 => (CHUNK, SOFTMAX_ROWS_BF16),
        _ => (CHUNK_F32, SOFTMAX_ROWS_F32),
    };
    let most = (chunk / (4 * keys)).clamp(64, queries.max(64));
    let scores = cx.block(most * keys * 4)?;
    // Shares of f32 take the place of their scores.
    let rounded = (dtype == DType::BF16).then(|| cx.block(most * keys * 2)).transpose()?;
    let shares = rounded.as_ref().unwrap_or(&scores);
    for head in 0..call.heads as usize {
        let column = |head: usize| (dtype.size() * head * dim) as DevicePtr;
        let kv_column = column(head / (call.heads / call.kv_heads) as usize);
        for first in (0..queries).step_by(most) {
            let rows = most.min(queries - first);
            let at = column(head + first * call.heads as usize);
            let [products, sums] = sizes(call, dtype, rows);
            let ask = Operands {
                w: call.k.start[0] + kv_column,
                x: call.q.start[0] + at,
                add: None,
                out: scores.at(cx),
                alpha: call.scale,
                scales: None,
            };
            cx.done(lt.run(cx, &products, &ask))?;
            let parameters = SoftmaxRows { x: scores.at(cx), out: shares.at(cx), n: int("attention", keys)? };
            cx.launch(softmax, [rows, 1], 256, 0, &parameters)?;
            let give = Operands {
                w: call.v.start[0] + kv_column,
                x: shares.at(cx),
                out: call.out + at,
                alpha: 1.0,
                ..ask
            };
            cx.done(lt.run(cx, &sums, &give))?;
        }
    }
    Ok(())
}

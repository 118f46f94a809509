//! Attention with its log-sum-exp, and its gradients: on tensor cores, and for any size.

use kiln_ops::training::shapes;
use kiln_ops::{AttentionSpec, Error, Result, Tensor as _};
use kiln_tensor::DType;

use super::attention_bf16::{
    self, ATTENTION_BACKWARD_KV_BF16_4, ATTENTION_BACKWARD_KV_BF16_16, ATTENTION_BACKWARD_KV_F32_4,
    ATTENTION_BACKWARD_KV_F32_16, ATTENTION_BACKWARD_Q_BF16_4, ATTENTION_BACKWARD_Q_BF16_16,
    ATTENTION_BACKWARD_Q_F32_4, ATTENTION_BACKWARD_Q_F32_16, AttentionBackward,
};
use crate::context::Context;
use crate::kernels::AttentionBackwardArgs;
use crate::ops::attention::{attention_into, build_args, segment_table};
use crate::tensor::CudaTensor;

/// Warps of a block of the kernels for any size.
const WARPS: usize = 4;

pub(crate) fn attention_lse(
    cx: &Context,
    q: &[&CudaTensor],
    k: &[&CudaTensor],
    v: &[&CudaTensor],
    spec: &AttentionSpec,
) -> Result<[CudaTensor; 2]> {
    let size = kiln_ops::shapes::attention(q, k, v, spec)?;
    let lse = CudaTensor::new(cx, [size.queries, size.heads], DType::F32)?;
    Ok([attention_into(cx, [q, k, v], spec, Some(&lse))?, lse])
}

#[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
pub(crate) fn attention_backward(
    cx: &Context,
    dout: &[&CudaTensor],
    q: &[&CudaTensor],
    k: &[&CudaTensor],
    v: &[&CudaTensor],
    out: &CudaTensor,
    lse: &CudaTensor,
    spec: &AttentionSpec,
) -> Result<[CudaTensor; 3]> {
    let size = shapes::attention_backward(dout, q, k, v, out, lse, spec)?;
    let dtype = out.dtype();
    if attention_bf16::supports(&size, dtype, spec) {
        return attention_bf16::backward(cx, dout, [q, k, v], out, lse, &size);
    }
    let dq = CudaTensor::new(cx, size.result(), dtype)?;
    let kv = [size.keys, size.kv_heads * size.head_dim];
    let [dk, dv] = [CudaTensor::new(cx, kv, dtype)?, CudaTensor::new(cx, kv, dtype)?];
    let delta = cx.allocate(4 * size.queries * size.heads)?;
    let mut concatenated = Vec::new();
    let forward = build_args(cx, [q, k, v], &size, &spec.mask, out.ptr(cx), &mut concatenated)?;
    let args = AttentionBackwardArgs {
        forward,
        dout: segment_table(cx, dout, &mut concatenated)?,
        lse: lse.ptr(cx),
        delta: delta.ptr(cx),
        dq: dq.ptr(cx),
        dk: dk.ptr(cx),
        dv: dv.ptr(cx),
    };
    let [of_queries, of_keys] = match (dtype, size.head_dim) {
        (DType::BF16, ..=128) => [ATTENTION_BACKWARD_Q_BF16_4, ATTENTION_BACKWARD_KV_BF16_4],
        (DType::BF16, ..=512) => [ATTENTION_BACKWARD_Q_BF16_16, ATTENTION_BACKWARD_KV_BF16_16],
        (_, ..=128) => [ATTENTION_BACKWARD_Q_F32_4, ATTENTION_BACKWARD_KV_F32_4],
        (_, ..=512) => [ATTENTION_BACKWARD_Q_F32_16, ATTENTION_BACKWARD_KV_F32_16],
        (_, wide) => {
            let what = format!("the CUDA kernels support heads of at most 512 elements, not {wide}");
            return Err(Error::Device { backend: cx.name(), what });
        }
    };
    let parameters = AttentionBackward { args };
    let grid = |rows: usize, heads: usize| [rows.div_ceil(WARPS), heads];
    cx.launch(of_queries, grid(size.queries, size.heads), 32 * WARPS, 0, &parameters)?;
    cx.launch(of_keys, grid(size.keys, size.kv_heads), 32 * WARPS, 0, &parameters)?;
    Ok([dq, dk, dv])
}

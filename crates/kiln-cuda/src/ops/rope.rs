use kiln_ops::{Result, RopePairs, RopeTable, Tensor as _, shapes};
use kiln_tensor::DType;

use super::{THREADS, by_dtype};
use crate::device::launch;
use crate::sources::ROPE;
use crate::sys::driver::DevicePtr;
use crate::{Context, CudaBackend, CudaTensor, int};

/// Threads of a block for heads of 128, and heads of one token that half a warp takes; the numbers are those in `rope.cu`.
const HEAD_THREADS: usize = 128;
const HEADS: usize = 4;

pub(crate) fn norm_rope(
    cx: &Context,
    x: &CudaTensor,
    weight: &CudaTensor,
    rope: &RopeTable<CudaBackend>,
    eps: f32,
) -> Result<CudaTensor> {
    let [tokens, heads, head_dim] = shapes::norm_rope(x, weight, rope)?;
    let out = CudaTensor::new(cx, x.shape(), x.dtype())?;
    if whole_heads(&[x], &[weight], rope) {
        let one = Heads { x: x.at(), weight: weight.at(), out: out.at(), heads };
        rope_heads(cx, x.dtype(), &[one], rope, tokens, eps)?;
        return Ok(out);
    }
    let name = by_dtype(x.dtype(), "norm_rope_f32", "norm_rope_bf16");
    let grid = [(32 * tokens * heads).div_ceil(THREADS), 1];
    let halves = i32::from(rope.pairs == RopePairs::Halves);
    cx.done(launch!(cx.device, ROPE, name, grid, THREADS, 0;
        x.at(), weight.at(), rope.cos.at(), rope.sin.at(), out.at(), tokens as i64,
        int("norm_rope", heads)?, int("norm_rope", head_dim)?, halves, eps))?;
    Ok(out)
}

pub(crate) fn qk_norm_rope(
    cx: &Context,
    xs: [&CudaTensor; 2],
    weights: [&CudaTensor; 2],
    rope: &RopeTable<CudaBackend>,
    eps: f32,
) -> Result<[CudaTensor; 2]> {
    let [q, k] = xs;
    let [tokens, q_heads, _] = shapes::norm_rope(q, weights[0], rope)?;
    let [_, k_heads, _] = shapes::norm_rope(k, weights[1], rope)?;
    if q.dtype() != k.dtype() || !whole_heads(&xs, &weights, rope) {
        let [q_weight, k_weight] = weights;
        return Ok([norm_rope(cx, q, q_weight, rope, eps)?, norm_rope(cx, k, k_weight, rope, eps)?]);
    }
    let out = [CudaTensor::new(cx, q.shape(), q.dtype())?, CudaTensor::new(cx, k.shape(), k.dtype())?];
    let heads = [q_heads, k_heads];
    let both =
        [0, 1].map(|i| Heads { x: xs[i].at(), weight: weights[i].at(), out: out[i].at(), heads: heads[i] });
    rope_heads(cx, q.dtype(), &both, rope, tokens, eps)?;
    Ok(out)
}

/// Heads of 128 of some tokens, by address.
#[derive(Clone, Copy)]
struct Heads {
    x: DevicePtr,
    weight: DevicePtr,
    out: DevicePtr,
    heads: usize,
}

/// Whether the kernel for heads of 128 takes these.
fn whole_heads(xs: &[&CudaTensor], weights: &[&CudaTensor], rope: &RopeTable<CudaBackend>) -> bool {
    weights.iter().all(|weight| weight.shape().last() == 128)
        && xs.iter().chain(weights).chain(&[&rope.cos, &rope.sin]).all(|x| x.at() % 16 == 0)
}

/// One launch for queries, or for queries and keys.
fn rope_heads(
    cx: &Context,
    dtype: DType,
    all: &[Heads],
    rope: &RopeTable<CudaBackend>,
    tokens: usize,
    eps: f32,
) -> Result<()> {
    let size = |n: usize| int("norm_rope", n);
    let name = by_dtype(dtype, "norm_rope_128_f32", "norm_rope_128_bf16");
    let parts = all.iter().map(|one| one.heads.div_ceil(HEADS)).max().unwrap_or(0);
    // The kernel counts lanes.
    size(16 * tokens * parts + HEAD_THREADS)?;
    let grid = [(16 * tokens * parts).div_ceil(HEAD_THREADS), all.len()];
    let (q, k) = (all[0], all[all.len() - 1]);
    cx.done(launch!(cx.device, ROPE, name, grid, HEAD_THREADS, 0;
        q.x, q.weight, q.out, size(q.heads)?, k.x, k.weight, k.out, size(k.heads)?,
        rope.cos.at(), rope.sin.at(), size(tokens)?, i32::from(rope.pairs == RopePairs::Halves), eps))
}

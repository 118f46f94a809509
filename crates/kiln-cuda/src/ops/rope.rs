use kiln_ops::{Backend, Result, RopePairs, RopeTable, Tensor as _, shapes};
use kiln_tensor::DType;

use super::{THREADS, by_dtype};
use crate::context::{Context, int};
use crate::kernels::{
    NORM_ROPE_128_BF16, NORM_ROPE_128_F32, NORM_ROPE_BF16, NORM_ROPE_F32, NormRope, NormRopeHeads,
};
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

/// Threads of a block for heads of 128, and heads of one token that half a warp takes; the numbers are those in `rope.cu`.
const HEAD_THREADS: usize = 128;
const HEADS: usize = 4;

pub(crate) fn norm_rope<B: Backend<Tensor = CudaTensor>>(
    cx: &Context,
    x: &CudaTensor,
    weight: &CudaTensor,
    rope: &RopeTable<B>,
    eps: f32,
) -> Result<CudaTensor> {
    let [tokens, heads, head_dim] = shapes::norm_rope(x, weight, rope)?;
    let out = CudaTensor::new(cx, x.shape(), x.dtype())?;
    if whole_heads(&[x], &[weight], rope) {
        let one = Heads { x: x.at(cx), weight: weight.at(cx), out: out.at(cx), heads };
        rope_heads(cx, x.dtype(), &[one], rope, tokens, eps)?;
        return Ok(out);
    }
    let kernel = by_dtype(x.dtype(), NORM_ROPE_F32, NORM_ROPE_BF16);
    let grid = [(32 * tokens * heads).div_ceil(THREADS), 1];
    let halves = i32::from(rope.pairs == RopePairs::Halves);
    let parameters = NormRope {
        x: x.at(cx),
        weight: weight.at(cx),
        cosines: rope.cos.at(cx),
        sines: rope.sin.at(cx),
        out: out.at(cx),
        tokens: tokens as i64,
        heads: int("norm_rope", heads)?,
        head_dim: int("norm_rope", head_dim)?,
        halves,
        eps,
    };
    cx.launch(kernel, grid, THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn qk_norm_rope<B: Backend<Tensor = CudaTensor>>(
    cx: &Context,
    xs: [&CudaTensor; 2],
    weights: [&CudaTensor; 2],
    rope: &RopeTable<B>,
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
    let both = [0, 1].map(|i| Heads {
        x: xs[i].at(cx),
        weight: weights[i].at(cx),
        out: out[i].at(cx),
        heads: heads[i],
    });
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
fn whole_heads<B: Backend<Tensor = CudaTensor>>(
    xs: &[&CudaTensor],
    weights: &[&CudaTensor],
    rope: &RopeTable<B>,
) -> bool {
    weights.iter().all(|weight| weight.shape().last() == 128)
        && xs.iter().chain(weights).chain(&[&rope.cos, &rope.sin]).all(|x| x.is_aligned())
}

/// One launch for queries, or for queries and keys.
fn rope_heads<B: Backend<Tensor = CudaTensor>>(
    cx: &Context,
    dtype: DType,
    all: &[Heads],
    rope: &RopeTable<B>,
    tokens: usize,
    eps: f32,
) -> Result<()> {
    let size = |n: usize| int("norm_rope", n);
    let kernel = by_dtype(dtype, NORM_ROPE_128_F32, NORM_ROPE_128_BF16);
    let parts = all.iter().map(|one| one.heads.div_ceil(HEADS)).max().unwrap_or(0);
    // The kernel counts lanes.
    size(16 * tokens * parts + HEAD_THREADS)?;
    let grid = [(16 * tokens * parts).div_ceil(HEAD_THREADS), all.len()];
    let (q, k) = (all[0], all[all.len() - 1]);
    let parameters = NormRopeHeads {
        x: q.x,
        weight: q.weight,
        out: q.out,
        heads: size(q.heads)?,
        k: k.x,
        k_weight: k.weight,
        k_out: k.out,
        k_heads: size(k.heads)?,
        cosines: rope.cos.at(cx),
        sines: rope.sin.at(cx),
        tokens: size(tokens)?,
        halves: i32::from(rope.pairs == RopePairs::Halves),
        eps,
    };
    cx.launch(kernel, grid, HEAD_THREADS, 0, &parameters)
}

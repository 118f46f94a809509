//! The norm of query and key heads, fused with the rotary embedding.

use kiln_ops::{Result, RopeLayout, RopeTable, Tensor as _, shapes};
use kiln_tensor::DType;

use super::grid::THREADS;
use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "rope" {
        NormRope(x: DevicePtr, weight: DevicePtr, cosines: DevicePtr, sines: DevicePtr, out: DevicePtr,
            tokens: i64, heads: i32, head_dim: i32, halves: i32, eps: f32):
            NORM_ROPE = "norm_rope" by dtype;
        NormRope128(x: DevicePtr, weight: DevicePtr, out: DevicePtr, heads: i32, k: DevicePtr,
            k_weight: DevicePtr, k_out: DevicePtr, k_heads: i32, cosines: DevicePtr, sines: DevicePtr,
            tokens: i32, halves: i32, eps: f32):
            NORM_ROPE_128 = "norm_rope_128" by dtype;
    }
}

/// Threads per block, and heads per half warp, of the kernel for heads of 128; as in `rope.cu`.
const HEAD_THREADS: usize = 128;
const HEADS_PER_GROUP: usize = 4;

pub(crate) fn norm_rope(
    cx: &Context,
    x: &CudaTensor,
    weight: Option<&CudaTensor>,
    rope: &RopeTable<CudaTensor>,
    eps: f32,
) -> Result<CudaTensor> {
    let [tokens, heads, head_dim] = shapes::norm_rope(x, weight, rope)?;
    let out = CudaTensor::new(cx, x.shape(), x.dtype())?;
    if supports_heads_128(&[x], weight.as_slice(), rope) {
        let tensor = HeadTensor { x: x.ptr(cx), weight: weight_ptr(cx, weight), out: out.ptr(cx), heads };
        launch_heads_128(cx, x.dtype(), &[tensor], rope, tokens, eps)?;
        return Ok(out);
    }
    let kernel = NORM_ROPE.of(x.dtype());
    let grid = [(32 * tokens * heads).div_ceil(THREADS), 1];
    let halves = i32::from(rope.pairs == RopeLayout::HalfSplit);
    let parameters = NormRope {
        x: x.ptr(cx),
        weight: weight_ptr(cx, weight),
        cosines: rope.cos.ptr(cx),
        sines: rope.sin.ptr(cx),
        out: out.ptr(cx),
        tokens: tokens as i64,
        heads: int("norm_rope", heads)?,
        head_dim: int("norm_rope", head_dim)?,
        halves,
        eps,
    };
    cx.launch(kernel, grid, THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn qk_norm_rope(
    cx: &Context,
    xs: [&CudaTensor; 2],
    weights: Option<[&CudaTensor; 2]>,
    rope: &RopeTable<CudaTensor>,
    eps: f32,
) -> Result<[CudaTensor; 2]> {
    let [q, k] = xs;
    let [q_weight, k_weight] = [0, 1].map(|i| weights.map(|weights| weights[i]));
    let [tokens, q_heads, _] = shapes::norm_rope(q, q_weight, rope)?;
    let [_, k_heads, _] = shapes::norm_rope(k, k_weight, rope)?;
    if q.dtype() != k.dtype()
        || !supports_heads_128(&xs, weights.as_ref().map_or(&[], |weights| weights), rope)
    {
        return Ok([norm_rope(cx, q, q_weight, rope, eps)?, norm_rope(cx, k, k_weight, rope, eps)?]);
    }
    let out = [CudaTensor::new(cx, q.shape(), q.dtype())?, CudaTensor::new(cx, k.shape(), k.dtype())?];
    let tensor = |x: &CudaTensor, weight, out: &CudaTensor, heads| HeadTensor {
        x: x.ptr(cx),
        weight: weight_ptr(cx, weight),
        out: out.ptr(cx),
        heads,
    };
    let tensors = [tensor(q, q_weight, &out[0], q_heads), tensor(k, k_weight, &out[1], k_heads)];
    launch_heads_128(cx, q.dtype(), &tensors, rope, tokens, eps)?;
    Ok(out)
}

/// Address of a weight; null means that heads are only rotated.
fn weight_ptr(cx: &Context, weight: Option<&CudaTensor>) -> DevicePtr {
    weight.map_or(DevicePtr::default(), |weight| weight.ptr(cx))
}

/// Addresses of queries or keys with heads of 128.
#[derive(Clone, Copy)]
struct HeadTensor {
    x: DevicePtr,
    weight: DevicePtr,
    out: DevicePtr,
    heads: usize,
}

/// Whether the kernel for heads of 128 takes these.
pub(super) fn supports_heads_128(
    xs: &[&CudaTensor],
    weights: &[&CudaTensor],
    rope: &RopeTable<CudaTensor>,
) -> bool {
    rope.cos.shape().last() == 64
        && xs.iter().chain(weights).chain(&[&rope.cos, &rope.sin]).all(|x| x.is_aligned())
}

/// Launches the kernel for heads of 128 for queries, or for queries and keys.
fn launch_heads_128(
    cx: &Context,
    dtype: DType,
    tensors: &[HeadTensor],
    rope: &RopeTable<CudaTensor>,
    tokens: usize,
    eps: f32,
) -> Result<()> {
    let size = |n: usize| int("norm_rope", n);
    let kernel = NORM_ROPE_128.of(dtype);
    let head_groups = tensors.iter().map(|tensor| tensor.heads.div_ceil(HEADS_PER_GROUP)).max().unwrap_or(0);
    // The kernel counts lanes in an `int`.
    size(16 * tokens * head_groups + HEAD_THREADS)?;
    let grid = [(16 * tokens * head_groups).div_ceil(HEAD_THREADS), tensors.len()];
    let (q, k) = (tensors[0], tensors[tensors.len() - 1]);
    let parameters = NormRope128 {
        x: q.x,
        weight: q.weight,
        out: q.out,
        heads: size(q.heads)?,
        k: k.x,
        k_weight: k.weight,
        k_out: k.out,
        k_heads: size(k.heads)?,
        cosines: rope.cos.ptr(cx),
        sines: rope.sin.ptr(cx),
        tokens: size(tokens)?,
        halves: i32::from(rope.pairs == RopeLayout::HalfSplit),
        eps,
    };
    cx.launch(kernel, grid, HEAD_THREADS, 0, &parameters)
}

//! Gradients of norms, rotary embeddings, SwiGLU and gates, and the loss.

use kiln_ops::training::shapes;
use kiln_ops::{Result, RopeLayout, RopeTable, RowGroups, Tensor as _};
use kiln_tensor::DType;

use super::optimizer::{SUM_PARTIALS, SumPartials};
use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::ops::epilogue::Epilogue;
use crate::ops::grid::{THREADS, row_grid};
use crate::ops::movement::cast;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "backward" {
        AdaLayerNormBackward(dy: DevicePtr, x: DevicePtr, scale: DevicePtr, add: DevicePtr,
            dx: DevicePtr, dim: i32, eps: f32):
            ADA_LAYER_NORM_BACKWARD = "ada_layer_norm_backward" by dtype;
        NormRopeBackward(dy: DevicePtr, x: DevicePtr, weight: DevicePtr, cosines: DevicePtr,
            sines: DevicePtr, dx: DevicePtr, tokens: i64, heads: i32, head_dim: i32, halves: i32,
            eps: f32):
            NORM_ROPE_BACKWARD = "norm_rope_backward" by dtype;
        NormRopeBackward128(dy: DevicePtr, x: DevicePtr, weight: DevicePtr, cosines: DevicePtr,
            sines: DevicePtr, dx: DevicePtr, tokens: i64, heads: i32, halves: i32, eps: f32):
            NORM_ROPE_BACKWARD_128 = "norm_rope_backward_128" by dtype;
        SwigluBackward(dy: DevicePtr, left_cols: i32, x: DevicePtr, d_left: DevicePtr, dx: DevicePtr,
            rows: i64, cols: i32):
            SWIGLU_BACKWARD = "swiglu_backward" by dtype;
        SquaredError(x: DevicePtr, y: DevicePtr, dx: DevicePtr, partials: DevicePtr, n: i64,
            per_block: i64, scale: f32):
            SQUARED_ERROR = "squared_error";
    }
}

/// Blocks of the first launch of a sum over all elements, at most.
const MAX_BLOCKS: usize = 256;

/// Threads per row, eight elements each.
fn row_threads(dim: usize) -> usize {
    dim.div_ceil(8).next_multiple_of(32).clamp(32, 1024)
}

pub(crate) fn ada_layer_norm_backward(
    cx: &Context,
    dy: &CudaTensor,
    x: &CudaTensor,
    scale: &CudaTensor,
    groups: &RowGroups,
    eps: f32,
    add: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let shape = shapes::ada_layer_norm_backward(dy, x, scale, groups, add)?;
    let dx = CudaTensor::new(cx, &shape, dy.dtype())?;
    let kernel = ADA_LAYER_NORM_BACKWARD.of(dy.dtype());
    let dim = shape.last();
    for (group, rows) in groups.ranges().enumerate() {
        let parameters = AdaLayerNormBackward {
            dy: dy.row_ptr(cx, rows.start),
            x: x.row_ptr(cx, rows.start),
            scale: scale.row_ptr(cx, group),
            add: add.map_or(0, |add| add.row_ptr(cx, rows.start)),
            dx: dx.row_ptr(cx, rows.start),
            dim: int("ada_layer_norm_backward", dim)?,
            eps,
        };
        let grid = [if dim == 0 { 0 } else { rows.len() }, 1];
        cx.launch(kernel, grid, row_threads(dim), 0, &parameters)?;
    }
    Ok(dx)
}

pub(crate) fn norm_rope_backward(
    cx: &Context,
    dy: &CudaTensor,
    x: &CudaTensor,
    weight: Option<&CudaTensor>,
    rope: &RopeTable<CudaTensor>,
    eps: f32,
) -> Result<CudaTensor> {
    let [tokens, heads, head_dim] = shapes::norm_rope_backward(dy, x, weight, rope)?;
    let dx = CudaTensor::new(cx, x.shape(), x.dtype())?;
    if let Some(weight) = weight
        && head_dim == 128
        && [dy, x, weight].iter().all(|x| x.is_aligned())
    {
        let parameters = NormRopeBackward128 {
            dy: dy.ptr(cx),
            x: x.ptr(cx),
            weight: weight.ptr(cx),
            cosines: rope.cos.ptr(cx),
            sines: rope.sin.ptr(cx),
            dx: dx.ptr(cx),
            tokens: tokens as i64,
            heads: int("norm_rope_backward", heads)?,
            halves: i32::from(rope.pairs == RopeLayout::HalfSplit),
            eps,
        };
        let kernel = NORM_ROPE_BACKWARD_128.of(x.dtype());
        cx.launch(kernel, [(16 * tokens * heads).div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
        return Ok(dx);
    }
    let parameters = NormRopeBackward {
        dy: dy.ptr(cx),
        x: x.ptr(cx),
        weight: weight.map_or(0, |weight| weight.ptr(cx)),
        cosines: rope.cos.ptr(cx),
        sines: rope.sin.ptr(cx),
        dx: dx.ptr(cx),
        tokens: tokens as i64,
        heads: int("norm_rope_backward", heads)?,
        head_dim: int("norm_rope_backward", head_dim)?,
        halves: i32::from(rope.pairs == RopeLayout::HalfSplit),
        eps,
    };
    let kernel = NORM_ROPE_BACKWARD.of(x.dtype());
    cx.launch(kernel, [(32 * tokens * heads).div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    Ok(dx)
}

pub(crate) fn swiglu_backward(cx: &Context, dy: &CudaTensor, x: &CudaTensor) -> Result<CudaTensor> {
    shapes::swiglu_backward(dy, x)?;
    let [_, dx] = concat_swiglu_backward(cx, dy, x)?;
    Ok(dx)
}

pub(crate) fn concat_swiglu_backward(
    cx: &Context,
    dy: &CudaTensor,
    x: &CudaTensor,
) -> Result<[CudaTensor; 2]> {
    let (left, cols) = shapes::concat_swiglu_backward(dy, x)?;
    let rows = x.shape().rows();
    let d_left = CudaTensor::new(cx, [rows, left], x.dtype())?;
    let dx = CudaTensor::new(cx, x.shape(), x.dtype())?;
    let parameters = SwigluBackward {
        dy: dy.ptr(cx),
        left_cols: int("swiglu_backward", left)?,
        x: x.ptr(cx),
        d_left: d_left.ptr(cx),
        dx: dx.ptr(cx),
        rows: rows as i64,
        cols: int("swiglu_backward", cols)?,
    };
    let kernel = SWIGLU_BACKWARD.of(x.dtype());
    let chunks = left.div_ceil(8) + cols.div_ceil(8);
    cx.launch(kernel, row_grid(rows, 8 * chunks), THREADS, 0, &parameters)?;
    Ok([d_left, dx])
}

pub(crate) fn gate_rows(
    cx: &Context,
    x: &CudaTensor,
    gate: &CudaTensor,
    groups: &RowGroups,
) -> Result<CudaTensor> {
    gate_and_add(cx, x, gate, groups, None)
}

pub(crate) fn gated_add(
    cx: &Context,
    x: &CudaTensor,
    gate: &CudaTensor,
    groups: &RowGroups,
    residual: &CudaTensor,
) -> Result<CudaTensor> {
    kiln_ops::shapes::add(x, residual)?;
    gate_and_add(cx, x, gate, groups, Some(residual))
}

fn gate_and_add(
    cx: &Context,
    x: &CudaTensor,
    gate: &CudaTensor,
    groups: &RowGroups,
    residual: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let shape = shapes::gate_rows(x, gate, groups)?;
    let out = CudaTensor::new(cx, &shape, x.dtype())?;
    for (group, rows) in groups.ranges().enumerate() {
        let epilogue = Epilogue {
            sums: x.row_ptr(cx, rows.start),
            sums_dtype: x.dtype(),
            bias: None,
            gate: Some(gate.row_ptr(cx, group)),
            residual: residual.map(|residual| residual.row_ptr(cx, rows.start)),
            out: out.row_ptr(cx, rows.start),
        };
        epilogue.run(cx, x.dtype(), rows.len(), shape.last())?;
    }
    Ok(out)
}

pub(crate) fn squared_error(
    cx: &Context,
    x: &CudaTensor,
    y: &CudaTensor,
    scale: f32,
) -> Result<[CudaTensor; 2]> {
    let shape = shapes::squared_error(x, y)?;
    let (a, b) = (cast(cx, x, DType::F32)?, cast(cx, y, DType::F32)?);
    let dx = CudaTensor::new(cx, &shape, DType::F32)?;
    let n = shape.numel();
    let blocks = n.div_ceil(8 * THREADS).clamp(1, MAX_BLOCKS);
    let (partials, loss) = (cx.allocate(4 * blocks)?, CudaTensor::new(cx, [1, 1], DType::F32)?);
    let parameters = SquaredError {
        x: a.ptr(cx),
        y: b.ptr(cx),
        dx: dx.ptr(cx),
        partials: partials.ptr(cx),
        n: n as i64,
        per_block: n.div_ceil(blocks) as i64,
        scale,
    };
    cx.launch(SQUARED_ERROR, [blocks, 1], THREADS, 0, &parameters)?;
    let count = int("squared_error", blocks)?;
    let parameters = SumPartials { partials: partials.ptr(cx), out: loss.ptr(cx), count, columns: 1 };
    cx.launch(SUM_PARTIALS, [1, 1], THREADS, 0, &parameters)?;
    Ok([loss, cast(cx, &dx, x.dtype())?])
}

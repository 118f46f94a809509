use kiln_ops::{Groups, Result, RopePairs, RopeTable, Tensor as _, shapes};

use super::{THREADS, by_dtype};
use crate::device::launch;
use crate::sources::NORM;
use crate::{Context, CudaBackend, CudaTensor, int};

/// Threads for a row: eight elements each, and more than one round only for rows wider than a block.
fn row_threads(dim: usize) -> usize {
    (dim.div_ceil(8)).next_power_of_two().clamp(32, 256)
}

pub(crate) fn ada_layer_norm(
    cx: &Context,
    x: &CudaTensor,
    [scale, shift]: [&CudaTensor; 2],
    groups: &Groups,
    eps: f32,
) -> Result<CudaTensor> {
    let shape = shapes::ada_layer_norm(x, scale, shift, groups)?;
    let dim = shape.last();
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let name = by_dtype(x.dtype(), "ada_layer_norm_f32", "ada_layer_norm_bf16");
    // One launch a group: there is hardly ever more than one.
    for (group, rows) in groups.ranges().enumerate() {
        let grid = [if dim == 0 { 0 } else { rows.len() }, 1];
        cx.done(launch!(cx.device, NORM, name, grid, row_threads(dim), 0;
            x.row_at(rows.start), scale.row_at(group), shift.row_at(group), out.row_at(rows.start),
            int("ada_layer_norm", dim)?, eps))?;
    }
    Ok(out)
}

pub(crate) fn rms_norm(cx: &Context, x: &CudaTensor, weight: &CudaTensor, eps: f32) -> Result<CudaTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let (rows, dim) = (shape.rows(), shape.last());
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let name = by_dtype(x.dtype(), "rms_norm_f32", "rms_norm_bf16");
    let grid = [if dim == 0 { 0 } else { rows }, 1];
    cx.done(launch!(cx.device, NORM, name, grid, row_threads(dim), 0;
        x.at(), weight.at(), out.at(), int("rms_norm", dim)?, eps))?;
    Ok(out)
}

pub(crate) fn norm_rope(
    cx: &Context,
    x: &CudaTensor,
    weight: &CudaTensor,
    rope: &RopeTable<CudaBackend>,
    eps: f32,
) -> Result<CudaTensor> {
    let [tokens, heads, head_dim] = shapes::norm_rope(x, weight, rope)?;
    let out = CudaTensor::new(cx, x.shape(), x.dtype())?;
    let name = by_dtype(x.dtype(), "norm_rope_f32", "norm_rope_bf16");
    let grid = [(32 * tokens * heads).div_ceil(THREADS), 1];
    let halves = i32::from(rope.pairs == RopePairs::Halves);
    cx.done(launch!(cx.device, NORM, name, grid, THREADS, 0;
        x.at(), weight.at(), rope.cos.at(), rope.sin.at(), out.at(), tokens as i64,
        int("norm_rope", heads)?, int("norm_rope", head_dim)?, halves, eps))?;
    Ok(out)
}

use kiln_ops::{Groups, Result, RopePairs, RopeTable, Tensor as _, shapes};

use super::{THREADS, by_dtype};
use crate::device::launch;
use crate::sources::NORM;
use crate::{Context, CudaBackend, CudaTensor, int};

/// Threads for a row: eight elements each, and more than one round only for rows wider than a block.
fn row_threads(dim: usize) -> usize {
    (dim.div_ceil(8)).next_power_of_two().clamp(32, 256)
}

/// Threads and vectors of each that hold a whole row; the numbers are those in `norm.cu`.
pub(super) const HELD_THREADS: usize = 128;
const HELD: usize = 4;
/// Heads of one token that half a warp takes there.
const ROPE_HEADS: usize = 8;

/// Whether a row fits the threads' registers, in whole vectors.
pub(super) fn held(dim: usize, operands: &[&CudaTensor]) -> bool {
    dim.is_multiple_of(8) && dim <= 8 * HELD * HELD_THREADS && operands.iter().all(|x| x.at() % 16 == 0)
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
    let held = held(dim, &[x, scale, shift]);
    let (name, threads) = match held {
        true => (by_dtype(x.dtype(), "ada_layer_norm_held_f32", "ada_layer_norm_held_bf16"), HELD_THREADS),
        false => (by_dtype(x.dtype(), "ada_layer_norm_f32", "ada_layer_norm_bf16"), row_threads(dim)),
    };
    // One launch a group: there is hardly ever more than one.
    for (group, rows) in groups.ranges().enumerate() {
        let grid = [if dim == 0 { 0 } else { rows.len() }, 1];
        cx.done(launch!(cx.device, NORM, name, grid, threads, 0;
            x.row_at(rows.start), scale.row_at(group), shift.row_at(group), out.row_at(rows.start),
            int("ada_layer_norm", dim)?, eps))?;
    }
    Ok(out)
}

pub(crate) fn rms_norm(cx: &Context, x: &CudaTensor, weight: &CudaTensor, eps: f32) -> Result<CudaTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let (rows, dim) = (shape.rows(), shape.last());
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let (name, threads) = match held(dim, &[x, weight]) {
        true => (by_dtype(x.dtype(), "rms_norm_held_f32", "rms_norm_held_bf16"), HELD_THREADS),
        false => (by_dtype(x.dtype(), "rms_norm_f32", "rms_norm_bf16"), row_threads(dim)),
    };
    let grid = [if dim == 0 { 0 } else { rows }, 1];
    cx.done(launch!(cx.device, NORM, name, grid, threads, 0;
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
    let operands = [x, weight, &rope.cos, &rope.sin];
    if head_dim == 128 && heads > 0 && operands.iter().all(|x| x.at() % 16 == 0) {
        let name = by_dtype(x.dtype(), "norm_rope_128_f32", "norm_rope_128_bf16");
        let grid = [(16 * tokens * heads.div_ceil(ROPE_HEADS)).div_ceil(HELD_THREADS), 1];
        let halves = i32::from(rope.pairs == RopePairs::Halves);
        cx.done(launch!(cx.device, NORM, name, grid, HELD_THREADS, 0;
            x.at(), weight.at(), rope.cos.at(), rope.sin.at(), out.at(), tokens as i64,
            int("norm_rope", heads)?, halves, eps))?;
        return Ok(out);
    }
    let name = by_dtype(x.dtype(), "norm_rope_f32", "norm_rope_bf16");
    let grid = [(32 * tokens * heads).div_ceil(THREADS), 1];
    let halves = i32::from(rope.pairs == RopePairs::Halves);
    cx.done(launch!(cx.device, NORM, name, grid, THREADS, 0;
        x.at(), weight.at(), rope.cos.at(), rope.sin.at(), out.at(), tokens as i64,
        int("norm_rope", heads)?, int("norm_rope", head_dim)?, halves, eps))?;
    Ok(out)
}

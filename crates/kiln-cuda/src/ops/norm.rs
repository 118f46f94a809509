use kiln_ops::{Groups, Result, Tensor as _, shapes};

use super::by_dtype;
use crate::context::{Context, int};
use crate::kernels::{
    ADA_LAYER_NORM_BF16, ADA_LAYER_NORM_F32, ADA_LAYER_NORM_HELD_BF16, ADA_LAYER_NORM_HELD_F32, AdaLayerNorm,
    AdaLayerNormHeld, RMS_NORM_BF16, RMS_NORM_F32, RMS_NORM_HELD_BF16, RMS_NORM_HELD_F32, RmsNorm,
    RmsNormHeld,
};
use crate::tensor::CudaTensor;

/// Threads for a row: eight elements each, and more than one round only for rows wider than a block.
fn row_threads(dim: usize) -> usize {
    (dim.div_ceil(8)).next_power_of_two().clamp(32, 256)
}

/// Vectors that the lanes of a row's warp hold, threads of a block with two such rows, and warps of a row where rows are few;
/// the numbers are those in `norm.cu`.
const HELD: usize = 16;
const HELD_THREADS: usize = 64;
const SPREAD: usize = 4;
/// Rows for a multiprocessor below which they are few.
const FEW: usize = 8;

/// Whether a row fits a warp's registers, in whole vectors.
pub(super) fn held(dim: usize, operands: &[&CudaTensor]) -> bool {
    dim.is_multiple_of(8) && (1..=8 * 32 * HELD).contains(&dim) && operands.iter().all(|x| x.is_aligned())
}

/// Blocks and threads for rows that do. Few rows are spread over more warps, so that the GPU has enough of them.
pub(super) fn held_grid(cx: &Context, rows: usize) -> ([usize; 2], usize) {
    if rows < FEW * cx.gpu().processors.max(1) as usize {
        return ([rows, 1], 32 * SPREAD);
    }
    ([rows.div_ceil(HELD_THREADS / 32), 1], HELD_THREADS)
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
    let size = |n: usize| int("ada_layer_norm", n);
    // One launch a group: there is hardly ever more than one.
    for (group, rows) in groups.ranges().enumerate() {
        let (from, to) = (x.row_at(cx, rows.start), out.row_at(cx, rows.start));
        let [scale, shift] = [scale, shift].map(|x| x.row_at(cx, group));
        if held {
            let kernel = by_dtype(x.dtype(), ADA_LAYER_NORM_HELD_F32, ADA_LAYER_NORM_HELD_BF16);
            let (grid, threads) = held_grid(cx, rows.len());
            let parameters = AdaLayerNormHeld {
                x: from,
                scale,
                shift,
                out: to,
                rows: size(rows.len())?,
                dim: size(dim)?,
                eps,
            };
            cx.launch(kernel, grid, threads, 0, &parameters)?;
        } else {
            let kernel = by_dtype(x.dtype(), ADA_LAYER_NORM_F32, ADA_LAYER_NORM_BF16);
            let grid = [if dim == 0 { 0 } else { rows.len() }, 1];
            let parameters = AdaLayerNorm { x: from, scale, shift, out: to, dim: size(dim)?, eps };
            cx.launch(kernel, grid, row_threads(dim), 0, &parameters)?;
        }
    }
    Ok(out)
}

pub(crate) fn rms_norm(cx: &Context, x: &CudaTensor, weight: &CudaTensor, eps: f32) -> Result<CudaTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let (rows, dim) = (shape.rows(), shape.last());
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let size = |n: usize| int("rms_norm", n);
    if held(dim, &[x, weight]) {
        let kernel = by_dtype(x.dtype(), RMS_NORM_HELD_F32, RMS_NORM_HELD_BF16);
        let (grid, threads) = held_grid(cx, rows);
        let parameters = RmsNormHeld {
            x: x.at(cx),
            weight: weight.at(cx),
            out: out.at(cx),
            rows: size(rows)?,
            dim: size(dim)?,
            eps,
        };
        cx.launch(kernel, grid, threads, 0, &parameters)?;
        return Ok(out);
    }
    let kernel = by_dtype(x.dtype(), RMS_NORM_F32, RMS_NORM_BF16);
    let grid = [if dim == 0 { 0 } else { rows }, 1];
    let parameters = RmsNorm { x: x.at(cx), weight: weight.at(cx), out: out.at(cx), dim: size(dim)?, eps };
    cx.launch(kernel, grid, row_threads(dim), 0, &parameters)?;
    Ok(out)
}

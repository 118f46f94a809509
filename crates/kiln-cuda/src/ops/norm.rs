//! Layer norm and RMS norm over the last axis.

use kiln_ops::{Result, RowGroups, Tensor as _, shapes};

use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "norm" {
        AdaLayerNorm(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, out: DevicePtr, dim: i32,
            eps: f32):
            ADA_LAYER_NORM = "ada_layer_norm" by dtype;
        RmsNorm(x: DevicePtr, weight: DevicePtr, out: DevicePtr, dim: i32, eps: f32):
            RMS_NORM = "rms_norm" by dtype;
        AdaLayerNormRegisters(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, out: DevicePtr,
            dim: i32, eps: f32):
            ADA_LAYER_NORM_REGISTERS = "ada_layer_norm_registers" by dtype;
        AdaLayerNormFp8(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, q: DevicePtr,
            scales: DevicePtr, dim: i32, padded: i32, eps: f32):
            ADA_LAYER_NORM_FP8 = "ada_layer_norm_fp8" by dtype;
        AdaLayerNormInt8(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, q: DevicePtr,
            scales: DevicePtr, dim: i32, padded: i32, group: i32, eps: f32):
            ADA_LAYER_NORM_INT8 = "ada_layer_norm_int8" by dtype;
        RmsNormRegisters(x: DevicePtr, weight: DevicePtr, out: DevicePtr, dim: i32, eps: f32):
            RMS_NORM_REGISTERS = "rms_norm_registers" by dtype;
    }
}

/// Threads per row, eight elements each. Rows wider than a block take several rounds, unless rows are too few to fill the
/// GPU.
fn row_threads(cx: &Context, rows: usize, dim: usize) -> usize {
    let most = if rows < cx.gpu().multiprocessors.max(1) as usize { 1024 } else { 256 };
    dim.div_ceil(8).next_power_of_two().clamp(32, most)
}

/// Threads of the block that has a row in registers, and vectors that each of them has; as in `norm.cu`.
pub(super) const ROW_THREADS: usize = 128;
const ROW_VECTORS: usize = 4;

/// Whether a row fits a block's registers, in whole vectors.
pub(super) fn fits_registers(dim: usize, operands: &[&CudaTensor]) -> bool {
    dim.is_multiple_of(8)
        && (1..=8 * ROW_THREADS * ROW_VECTORS).contains(&dim)
        && operands.iter().all(|x| x.is_aligned())
}

pub(crate) fn ada_layer_norm(
    cx: &Context,
    x: &CudaTensor,
    scale: &CudaTensor,
    shift: &CudaTensor,
    groups: &RowGroups,
    eps: f32,
) -> Result<CudaTensor> {
    let shape = shapes::ada_layer_norm(x, scale, shift, groups)?;
    let dim = shape.last();
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let fits_registers = fits_registers(dim, &[x, scale, shift]);
    let size = |n: usize| int("ada_layer_norm", n);
    // One launch per group; there is rarely more than one.
    for (group, rows) in groups.ranges().enumerate() {
        let (from, to) = (x.row_ptr(cx, rows.start), out.row_ptr(cx, rows.start));
        let [scale, shift] = [scale, shift].map(|x| x.row_ptr(cx, group));
        if fits_registers {
            let kernel = ADA_LAYER_NORM_REGISTERS.of(x.dtype());
            let parameters = AdaLayerNormRegisters { x: from, scale, shift, out: to, dim: size(dim)?, eps };
            cx.launch(kernel, [rows.len(), 1], ROW_THREADS, 0, &parameters)?;
        } else {
            let kernel = ADA_LAYER_NORM.of(x.dtype());
            let grid = [if dim == 0 { 0 } else { rows.len() }, 1];
            let parameters = AdaLayerNorm { x: from, scale, shift, out: to, dim: size(dim)?, eps };
            cx.launch(kernel, grid, row_threads(cx, rows.len(), dim), 0, &parameters)?;
        }
    }
    Ok(out)
}

pub(crate) fn rms_norm(cx: &Context, x: &CudaTensor, weight: &CudaTensor, eps: f32) -> Result<CudaTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let (rows, dim) = (shape.rows(), shape.last());
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let size = |n: usize| int("rms_norm", n);
    if fits_registers(dim, &[x, weight]) {
        let kernel = RMS_NORM_REGISTERS.of(x.dtype());
        let parameters =
            RmsNormRegisters { x: x.ptr(cx), weight: weight.ptr(cx), out: out.ptr(cx), dim: size(dim)?, eps };
        cx.launch(kernel, [rows, 1], ROW_THREADS, 0, &parameters)?;
        return Ok(out);
    }
    let kernel = RMS_NORM.of(x.dtype());
    let grid = [if dim == 0 { 0 } else { rows }, 1];
    let parameters = RmsNorm { x: x.ptr(cx), weight: weight.ptr(cx), out: out.ptr(cx), dim: size(dim)?, eps };
    cx.launch(kernel, grid, row_threads(cx, rows, dim), 0, &parameters)?;
    Ok(out)
}

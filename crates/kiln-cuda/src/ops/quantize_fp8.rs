//! Quantization to fp8, for weights and activations.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::kernels::{GradientArgs, kernels};
use crate::sys::driver::DevicePtr;

kernels! {
    "fp8" {
        QuantizeFp8(x: DevicePtr, x_cols: i32, y: DevicePtr, y_cols: i32, q: DevicePtr,
            scales: DevicePtr, padded: i32):
            QUANTIZE_FP8 = "quantize_fp8" by dtype;
        QuantizeGradientFp8(args: GradientArgs):
            QUANTIZE_GRADIENT_FP8 = "quantize_gradient_fp8" by dtype;
        TransposeFp8(x: DevicePtr, out: DevicePtr, scales: DevicePtr, rows: i32, cols: i32, depth: i32,
            out_depth: i32):
            TRANSPOSE_FP8 = "transpose_fp8";
        GemmFp8(x: DevicePtr, x_scales: DevicePtr, w: DevicePtr, w_scales: DevicePtr, out: DevicePtr,
            rows: i32, n: i32, depth: i32):
            GEMM_FP8 = "gemm_fp8" by dtype;
        RescaleFp8(out: DevicePtr, x_scales: DevicePtr, w_scales: DevicePtr, rows: i64, n: i32):
            RESCALE_FP8 = "rescale_fp8" by dtype;
    }
}

/// Columns that a thread of the quantizing kernels keeps, and their largest block, as in `fp8.cu`.
const KEPT_COLUMNS: usize = 48;
const MAX_THREADS: usize = 512;

/// Threads of a block that quantizes a row of `depth` bytes: those that keep all of it, if possible.
pub(crate) fn quantize_threads(depth: usize) -> usize {
    depth.div_ceil(KEPT_COLUMNS).next_multiple_of(32).min(MAX_THREADS)
}

/// Quantizes the rows of two matrices, concatenated by columns, to fp8 rows of `depth` bytes with one scale each.
pub(crate) fn quantize_rows(
    cx: &Context,
    dtype: DType,
    [x, y]: [DevicePtr; 2],
    widths: [usize; 2],
    rows: usize,
    [bytes, scales]: [DevicePtr; 2],
    depth: usize,
) -> Result<()> {
    let kernel = QUANTIZE_FP8.of(dtype);
    let size = |n: usize| int("linear", n);
    let parameters = QuantizeFp8 {
        x,
        x_cols: size(widths[0])?,
        y,
        y_cols: size(widths[1])?,
        q: bytes,
        scales,
        padded: size(depth)?,
    };
    cx.launch(kernel, [rows, 1], quantize_threads(depth), 0, &parameters)
}

//! Quantization to fp8, for weights and activations.

use kiln_ops::Result;
use kiln_tensor::DType;

use super::grid::by_dtype;
use crate::context::{Context, int};
use crate::kernels::{QUANTIZE_FP8_BF16, QUANTIZE_FP8_F32, QuantizeFp8};
use crate::sys::driver::DevicePtr;

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
    let kernel = by_dtype(dtype, QUANTIZE_FP8_F32, QUANTIZE_FP8_BF16);
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
    cx.launch(kernel, [rows, 1], 256, 0, &parameters)
}

use kiln_ops::Result;
use kiln_tensor::DType;

use super::by_dtype;
use crate::context::{Context, int};
use crate::kernels::{QUANTISE_FP8_BF16, QUANTISE_FP8_F32, QuantiseFp8};
use crate::sys::driver::DevicePtr;

/// Rounds rows of two matrices side by side: their addresses and widths, where bytes and scales go, bytes of a row.
pub(crate) fn round_rows(
    cx: &Context,
    dtype: DType,
    [x, y]: [DevicePtr; 2],
    widths: [usize; 2],
    rows: usize,
    [bytes, scales]: [DevicePtr; 2],
    depth: usize,
) -> Result<()> {
    let kernel = by_dtype(dtype, QUANTISE_FP8_F32, QUANTISE_FP8_BF16);
    let size = |n: usize| int("linear", n);
    let parameters = QuantiseFp8 {
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

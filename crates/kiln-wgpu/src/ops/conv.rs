//! Convolutions as products whose input is read from the image.

use kiln_ops::{ConvGeometry, Result, Tensor, shapes};

use super::product::{Input, Output, Patches, Product};
use crate::context::Context;
use crate::tensor::WgpuTensor;
use crate::weight::WgpuConv;

pub(crate) fn conv2d(
    cx: &Context,
    x: &WgpuTensor,
    conv: &WgpuConv,
    geometry: ConvGeometry,
    residual: Option<&WgpuTensor>,
) -> Result<WgpuTensor> {
    let shape = shapes::conv2d(x, conv.size, &geometry, residual)?;
    let [out, channels, height, width] = conv.size;
    let pixels = shape.rows();
    let result_width = shape.dims()[1];
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    if pixels == 0 {
        return Ok(y);
    }
    let dims = x.shape().dims();
    let [top, _, left, _] = geometry.padding;
    let patches = Patches {
        size: [dims[0], dims[1], channels],
        kernel: [height, width],
        width: result_width,
        stride: geometry.stride,
        top,
        left,
        upsample: geometry.upsample,
    };
    let point =
        [height, width] == [1, 1] && geometry == ConvGeometry { stride: 1, padding: [0; 4], upsample: false };
    let product = Product {
        input: if point { Input::Matrix(x) } else { Input::Image(x, &patches) },
        inner: channels * height * width,
        out,
        columns: Some(&conv.columns),
        row_scales: None,
        gate: None,
        residual,
        accumulate: false,
        scale: 1.0,
    };
    product.run(cx, &conv.parts, &[Output { tensor: &y, columns: 0..out }], 0..pixels)?;
    Ok(y)
}

use kiln_ops::{ConvGeometry, Result, Tensor as _, shapes};

use super::movement::{image, upsample};
use super::{conv_f32, conv_hopper};
use crate::context::{Context, int};
use crate::gemm::own;
use crate::kernels::Conv;
use crate::tensor::CudaTensor;
use crate::weight::CudaConv;

pub(crate) fn conv2d(
    cx: &Context,
    x: &CudaTensor,
    conv: &CudaConv,
    geometry: ConvGeometry,
    residual: Option<&CudaTensor>,
) -> Result<CudaTensor> {
    let shape = shapes::conv2d(x, conv.size, &geometry, residual)?;
    let out = CudaTensor::new(cx, &shape, x.dtype())?;
    let size = |n: usize| int("conv2d", n);
    let sizes = |n: [usize; 3]| -> Result<[i32; 3]> { Ok([size(n[0])?, size(n[1])?, size(n[2])?]) };
    let (input, output) = (image(x.shape()), image(&shape));
    // The kernels count pixels and places in the padded picture.
    size(output[0] * output[1])?;
    let [_, channels, height, width] = conv.size;
    let [top, bottom, left, right] = geometry.padding;
    size(2 * input[0].max(input[1]) + top + bottom + left + right)?;
    let call = Conv {
        x: x.at(cx),
        w: conv.kernel.at(cx, x.dtype(), 0, 0)?,
        bias: conv.bias.as_ref().map_or(0, |bias| bias.at(cx)),
        add: residual.map_or(0, |x| x.at(cx)),
        out: out.at(cx),
        ldx: channels as i64,
        ldw: conv.kernel.cols as i64,
        ldadd: output[2] as i64,
        ldo: output[2] as i64,
        alpha: 1.0,
        input: sizes(input)?,
        output: sizes(output)?,
        kernel: [size(height)?, size(width)?],
        stride: size(geometry.stride)?,
        padding: [size(top)?, size(left)?],
        upsample: i32::from(geometry.upsample),
    };
    let empty = output.contains(&0) || input.contains(&0);
    if !empty && conv_f32::takes(&call, x.dtype()) {
        conv_f32::run(cx, &call, conv)?;
        return Ok(out);
    }
    if empty || !own::takes_tiles(&call, x.dtype()) {
        own::run(cx, &call, x.dtype(), x.dtype())?;
        return Ok(out);
    }
    if conv_hopper::takes(cx, &call, x.dtype()) {
        conv_hopper::run(cx, &call, conv)?;
        return Ok(out);
    }
    // The copy engine can't read a pixel twice in a row; written out it costs less than slower products.
    let plain = Conv { upsample: 0, ..call };
    if geometry.upsample && conv_hopper::takes(cx, &plain, x.dtype()) {
        let larger = upsample(cx, x)?;
        let plain = Conv { x: larger.at(cx), input: sizes(image(larger.shape()))?, ..plain };
        conv_hopper::run(cx, &plain, conv)?;
        return Ok(out);
    }
    own::run(cx, &call, x.dtype(), x.dtype())?;
    Ok(out)
}

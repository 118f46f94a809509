//! Convolutions: builds the arguments and chooses among the f32, Hopper and implicit GEMM kernels.

use kiln_ops::{ConvGeometry, Result, Tensor as _, shapes};

use super::movement::{image_dims, upsample};
use super::{conv_f32, conv_hopper};
use crate::context::{Context, int};
use crate::gemm::implicit_gemm;
use crate::kernels::ConvArgs;
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
    let (input, output) = (image_dims(x.shape()), image_dims(&shape));
    // The kernels count pixels, also of the padded image, in an `int`.
    size(output[0] * output[1])?;
    let [_, channels, height, width] = conv.size;
    let [top, bottom, left, right] = geometry.padding;
    size(2 * input[0].max(input[1]) + top + bottom + left + right)?;
    let args = ConvArgs {
        x: x.ptr(cx),
        w: conv.kernel.ptr(cx, x.dtype(), 0, 0)?,
        bias: conv.bias.as_ref().map_or(0, |bias| bias.ptr(cx)),
        add: residual.map_or(0, |x| x.ptr(cx)),
        out: out.ptr(cx),
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
    if !empty && conv_f32::supports(&args, x.dtype()) {
        conv_f32::run(cx, &args, conv)?;
        return Ok(out);
    }
    if empty || !implicit_gemm::supports_tensor_cores(&args, x.dtype()) {
        implicit_gemm::run(cx, &args, x.dtype(), x.dtype())?;
        return Ok(out);
    }
    if conv_hopper::supports(cx, &args, x.dtype()) {
        return Ok(out.with_moments(conv_hopper::run(cx, &args, conv)?));
    }
    // TMA cannot read a pixel twice, and an upsampled copy costs less than the slower kernels.
    let plain = ConvArgs { upsample: 0, ..args };
    if geometry.upsample && conv_hopper::supports(cx, &plain, x.dtype()) {
        let larger = upsample(cx, x)?;
        let plain = ConvArgs { x: larger.ptr(cx), input: sizes(image_dims(larger.shape()))?, ..plain };
        return Ok(out.with_moments(conv_hopper::run(cx, &plain, conv)?));
    }
    implicit_gemm::run(cx, &args, x.dtype(), x.dtype())?;
    Ok(out)
}

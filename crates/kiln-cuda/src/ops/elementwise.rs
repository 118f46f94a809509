//! Elementwise operations.

use kiln_ops::{Activation, Result, Tensor as _, shapes};
use kiln_tensor::DType;

use super::grid::{THREADS, elementwise_grid, row_grid};
use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "elementwise" {
        Unary(x: DevicePtr, out: DevicePtr, n: i64, f: i32):
            UNARY = "unary" by dtype;
        Binary(x: DevicePtr, y: DevicePtr, out: DevicePtr, n: i64, f: i32, s: f32):
            BINARY = "binary" by dtype;
        Swiglu(left: DevicePtr, left_cols: i32, x: DevicePtr, out: DevicePtr, rows: i64, cols: i32):
            SWIGLU = "swiglu" by dtype;
        Affine(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, out: DevicePtr, rows: i64, cols: i32):
            AFFINE = "affine" by dtype;
        BlendRows(x: DevicePtr, y: DevicePtr, mask: DevicePtr, out: DevicePtr, rows: i64, cols: i32):
            BLEND_ROWS = "blend_rows" by dtype;
        Cast(x: DevicePtr, out: DevicePtr, n: i64):
            CAST_F32_BF16 = "cast_f32_bf16", CAST_BF16_F32 = "cast_bf16_f32", CAST_F16_F32 = "cast_f16_f32",
            CAST_F16_BF16 = "cast_f16_bf16";
    }
}

/// The kernels' code of an activation; 0 is none.
pub(crate) fn activation_code(f: Option<Activation>) -> i32 {
    match f {
        None => 0,
        Some(Activation::Silu) => 1,
        Some(Activation::Relu) => 2,
        Some(Activation::SoftClamp) => 3,
        Some(Activation::Gelu) => 4,
    }
}

pub(crate) fn activation(cx: &Context, x: &CudaTensor, f: Activation) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::activation(x)?, x.dtype())?;
    let n = x.shape().numel();
    let kernel = UNARY.of(x.dtype());
    let parameters = Unary { x: x.ptr(cx), out: out.ptr(cx), n: n as i64, f: activation_code(Some(f)) };
    cx.launch(kernel, elementwise_grid(n), THREADS, 0, &parameters)?;
    Ok(out)
}

/// Functions of two tensors and a scalar, with the kernel's codes.
#[derive(Clone, Copy)]
enum BinaryOp {
    /// `x + s · y`.
    AddScaled = 0,
    /// `s · y + (1 - s) · x`.
    Lerp = 1,
    /// `y + s · (x - y)`.
    Guide = 2,
}

pub(crate) fn add(cx: &Context, x: &CudaTensor, y: &CudaTensor) -> Result<CudaTensor> {
    shapes::add(x, y)?;
    binary(cx, x, y, BinaryOp::AddScaled, 1.0)
}

pub(crate) fn add_scaled(cx: &Context, x: &CudaTensor, y: &CudaTensor, s: f32) -> Result<CudaTensor> {
    shapes::add_scaled(x, y)?;
    binary(cx, x, y, BinaryOp::AddScaled, s)
}

pub(crate) fn lerp(cx: &Context, x: &CudaTensor, y: &CudaTensor, t: f32) -> Result<CudaTensor> {
    shapes::lerp(x, y)?;
    binary(cx, x, y, BinaryOp::Lerp, t)
}

pub(crate) fn guide(cx: &Context, c: &CudaTensor, u: &CudaTensor, g: f32) -> Result<CudaTensor> {
    shapes::guide(c, u)?;
    binary(cx, c, u, BinaryOp::Guide, g)
}

fn binary(cx: &Context, x: &CudaTensor, y: &CudaTensor, f: BinaryOp, s: f32) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, x.shape(), x.dtype())?;
    let n = x.shape().numel();
    let kernel = BINARY.of(x.dtype());
    let parameters = Binary { x: x.ptr(cx), y: y.ptr(cx), out: out.ptr(cx), n: n as i64, f: f as i32, s };
    cx.launch(kernel, elementwise_grid(n), THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn swiglu(cx: &Context, x: &CudaTensor) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, shapes::swiglu(x)?, x.dtype())?;
    swiglu_into(cx, x, &out)?;
    Ok(out)
}

pub(crate) fn concat_swiglu(cx: &Context, left: &CudaTensor, x: &CudaTensor) -> Result<CudaTensor> {
    kiln_ops::training::shapes::concat_swiglu(left, x)?;
    let (shape, left_cols) = (shapes::swiglu(x)?, left.shape().last());
    let out = CudaTensor::new(cx, [shape.rows(), left_cols + shape.last()], x.dtype())?;
    launch_swiglu(cx, (left.ptr(cx), left_cols), x, &out)?;
    Ok(out)
}

/// Computes SwiGLU of `x` into a tensor of its shape.
pub(super) fn swiglu_into(cx: &Context, x: &CudaTensor, out: &CudaTensor) -> Result<()> {
    launch_swiglu(cx, (0, 0), x, out)
}

/// Concatenates `left`, an address and a width, and SwiGLU of `x` by columns.
fn launch_swiglu(
    cx: &Context,
    (left, left_cols): (DevicePtr, usize),
    x: &CudaTensor,
    out: &CudaTensor,
) -> Result<()> {
    let (rows, cols) = (out.shape().rows(), out.shape().last() - left_cols);
    let kernel = SWIGLU.of(x.dtype());
    let chunks = left_cols.div_ceil(8) + cols.div_ceil(8);
    let parameters = Swiglu {
        left,
        left_cols: int("swiglu", left_cols)?,
        x: x.ptr(cx),
        out: out.ptr(cx),
        rows: rows as i64,
        cols: int("swiglu", cols)?,
    };
    cx.launch(kernel, row_grid(rows, 8 * chunks), THREADS, 0, &parameters)
}

pub(crate) fn blend_rows(
    cx: &Context,
    x: &CudaTensor,
    y: &CudaTensor,
    mask: &CudaTensor,
) -> Result<CudaTensor> {
    let shape = shapes::blend_rows(x, y, mask)?;
    let (rows, cols) = (shape.rows(), shape.last());
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let kernel = BLEND_ROWS.of(x.dtype());
    let parameters = BlendRows {
        x: x.ptr(cx),
        y: y.ptr(cx),
        mask: mask.ptr(cx),
        out: out.ptr(cx),
        rows: rows as i64,
        cols: int("blend_rows", cols)?,
    };
    cx.launch(kernel, row_grid(rows, cols), THREADS, 0, &parameters)?;
    Ok(out)
}

pub(crate) fn affine(
    cx: &Context,
    x: &CudaTensor,
    scale: &CudaTensor,
    shift: &CudaTensor,
) -> Result<CudaTensor> {
    let shape = shapes::affine(x, scale, shift)?;
    let cols = shape.last();
    let rows = shape.numel() / cols.max(1);
    let out = CudaTensor::new(cx, shape, x.dtype())?;
    let kernel = AFFINE.of(x.dtype());
    let parameters = Affine {
        x: x.ptr(cx),
        scale: scale.ptr(cx),
        shift: shift.ptr(cx),
        out: out.ptr(cx),
        rows: rows as i64,
        cols: int("affine", cols)?,
    };
    cx.launch(kernel, row_grid(rows, cols), THREADS, 0, &parameters)?;
    Ok(out)
}

/// Converts `n` elements to another dtype.
pub(crate) fn cast_buffer(
    cx: &Context,
    from: DType,
    x: DevicePtr,
    to: DType,
    out: DevicePtr,
    n: usize,
) -> Result<()> {
    let kernel = match (from, to) {
        (DType::F32, DType::BF16) => CAST_F32_BF16,
        (DType::BF16, DType::F32) => CAST_BF16_F32,
        (DType::F16, DType::F32) => CAST_F16_F32,
        (DType::F16, DType::BF16) => CAST_F16_BF16,
        _ => return cx.check(cx.copy(x, out, n * from.size())),
    };
    cx.launch(kernel, elementwise_grid(n), THREADS, 0, &Cast { x, out, n: n as i64 })
}

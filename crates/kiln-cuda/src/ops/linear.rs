//! Linear layers: products with dense, int8, fp8 and nvfp4 weights, LoRA updates, and what follows them.

mod call;
mod ends;

use kiln_ops::{Result, RowGroups, Tensor as _, shapes};

use self::call::{LinearCall, Quantized};
use super::fp8::Fp8Operand;
use super::int8::Int8Operand;
use super::norm::{ada_layer_norm, fits_registers};
use crate::context::Context;
use crate::tensor::CudaTensor;
use crate::weight::{CudaWeight, WeightMatrix};

pub(crate) fn linear(cx: &Context, x: &CudaTensor, w: &CudaWeight) -> Result<CudaTensor> {
    let shape = shapes::linear(x, w.size())?;
    let xs = [x];
    LinearCall::new(cx, &xs, w)?.outputs(0..shape.last())
}

pub(crate) fn linear_split<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    shapes::linear_split(x, w.size(), &widths)?;
    let xs = [x];
    LinearCall::new(cx, &xs, w)?.split(widths)
}

pub(crate) fn ada_linear_split<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    modulation: [&CudaTensor; 2],
    groups: &RowGroups,
    eps: f32,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    shapes::ada_linear_split(x, modulation, groups, w.size(), &widths)?;
    with_ada_layer_norm(cx, x, modulation, groups, eps, w, |call| call.split(widths))
}

pub(crate) fn ada_linear_swiglu<const N: usize>(
    cx: &Context,
    x: &CudaTensor,
    modulation: [&CudaTensor; 2],
    groups: &RowGroups,
    eps: f32,
    w: &CudaWeight,
    widths: [usize; N],
) -> Result<[CudaTensor; N]> {
    shapes::ada_linear_swiglu(x, modulation, groups, w.size(), &widths)?;
    with_ada_layer_norm(cx, x, modulation, groups, eps, w, |call| call.split_swiglu(widths))
}

/// Calls a layer on the modulated norm of its input, which the norm's kernel quantizes where it can.
fn with_ada_layer_norm<R>(
    cx: &Context,
    x: &CudaTensor,
    modulation: [&CudaTensor; 2],
    groups: &RowGroups,
    eps: f32,
    w: &CudaWeight,
    run: impl FnOnce(LinearCall<'_>) -> Result<R>,
) -> Result<R> {
    let (rows, dtype) = (x.shape().rows(), x.dtype());
    let matrix = w.load(cx, dtype)?;
    // LoRA updates need the unquantized input.
    if w.deltas.is_empty() && fits_registers(w.size()[1], &[x, modulation[0], modulation[1]]) {
        let quantized = match &*matrix {
            // The norm's kernel does not round to nvfp4.
            WeightMatrix::Dense(_) | WeightMatrix::Nvfp4(_) => None,
            WeightMatrix::Int8(weight) => Some(Quantized::Int8(Int8Operand::from_ada_layer_norm(
                cx, x, modulation, groups, eps, weight,
            )?)),
            WeightMatrix::Fp8(weight) => {
                Some(Quantized::Fp8(Fp8Operand::from_ada_layer_norm(cx, x, modulation, groups, eps, weight)?))
            }
        };
        if quantized.is_some() {
            return run(LinearCall { cx, xs: &[], w, matrix, rows, dtype, inner: Vec::new(), quantized });
        }
    }
    let normed = ada_layer_norm(cx, x, modulation[0], modulation[1], groups, eps)?;
    let xs = [&normed];
    run(LinearCall::with_matrix(cx, &xs, w, matrix)?)
}

pub(crate) fn linear_swiglu(cx: &Context, x: &CudaTensor, w: &CudaWeight) -> Result<CudaTensor> {
    shapes::linear_swiglu(x, w.size())?;
    let xs = [x];
    LinearCall::new(cx, &xs, w)?.swiglu_outputs(0..w.size()[0])
}

pub(crate) fn linear_gated_add(
    cx: &Context,
    xs: &[&CudaTensor],
    w: &CudaWeight,
    gate: Option<(&CudaTensor, &RowGroups)>,
    residual: &CudaTensor,
) -> Result<CudaTensor> {
    let shape = shapes::linear_gated_add(xs, w.size(), gate, residual)?;
    LinearCall::new(cx, xs, w)?.gated_add(shape.last(), gate, residual)
}

/// The outputs of a layer, split into these widths, each added to its tensor of `onto`, whose memory it takes.
pub(crate) fn linear_onto(
    cx: &Context,
    x: &CudaTensor,
    w: &CudaWeight,
    widths: &[usize],
    onto: Vec<Option<CudaTensor>>,
) -> Result<Vec<CudaTensor>> {
    let xs = [x];
    let call = LinearCall::new(cx, &xs, w)?;
    let (mut first_row, mut outputs) = (0, Vec::with_capacity(widths.len()));
    let mut onto = onto.into_iter();
    for run in widths.chunk_by(|a, b| a == b) {
        let (width, onto): (usize, Vec<_>) = (run[0], onto.by_ref().take(run.len()).collect());
        if onto.iter().all(Option::is_none) {
            outputs.extend(call.equal_outputs(first_row, width, run.len())?);
        } else {
            for (i, onto) in onto.into_iter().enumerate() {
                let rows = first_row + i * width..first_row + (i + 1) * width;
                outputs.push(match onto {
                    Some(onto) => call.output_onto(rows, onto)?,
                    None => call.outputs(rows)?,
                });
            }
        }
        first_row += width * run.len();
    }
    Ok(outputs)
}

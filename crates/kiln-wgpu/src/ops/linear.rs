//! Linear layers: the product with the weight, then the thin products of LoRA deltas, added to its result.

use std::array;
use std::ops::Range;

use kiln_ops::{Result, RowGroups, Tensor, shapes};
use kiln_tensor::{DType, Rotation};

use super::movement::concat_columns;
use super::product::{Gate, Input, Output, Product};
use super::quantize::{Quantized, quantize_rows, rotate_rows};
use crate::context::Context;
use crate::tensor::WgpuTensor;
use crate::weight::{ProductKind, WgpuWeight};

pub(crate) fn linear(cx: &Context, x: &WgpuTensor, w: &WgpuWeight) -> Result<WgpuTensor> {
    let shape = shapes::linear(x, w.size())?;
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    let output = Output { tensor: &y, columns: 0..w.size()[0] };
    layer(cx, x, w, &[output], None, None)?;
    Ok(y)
}

pub(crate) fn linear_split<const N: usize>(
    cx: &Context,
    x: &WgpuTensor,
    w: &WgpuWeight,
    widths: [usize; N],
) -> Result<[WgpuTensor; N]> {
    let all = shapes::linear_split(x, w.size(), &widths)?;
    let ys = all.into_iter().map(|shape| WgpuTensor::new(cx, shape, x.dtype()));
    let ys = ys.collect::<Result<Vec<_>>>()?;
    let mut column = 0;
    let outputs = ys.iter().map(|tensor| {
        let columns = column..column + tensor.shape().last();
        column = columns.end;
        Output { tensor, columns }
    });
    layer(cx, x, w, &outputs.collect::<Vec<_>>(), None, None)?;
    Ok(array::from_fn(|i| ys[i].clone()))
}

pub(crate) fn linear_gated_add(
    cx: &Context,
    xs: &[&WgpuTensor],
    w: &WgpuWeight,
    gate: Option<(&WgpuTensor, &RowGroups)>,
    residual: &WgpuTensor,
) -> Result<WgpuTensor> {
    let shape = shapes::linear_gated_add(xs, w.size(), gate, residual)?;
    let x = concat_columns(cx, xs)?;
    let y = WgpuTensor::new(cx, shape, x.dtype())?;
    let output = Output { tensor: &y, columns: 0..w.size()[0] };
    layer(cx, &x, w, &[output], gate, Some(residual))?;
    Ok(y)
}

/// `residual + gate · (x · Wᵀ + bias + deltas)`, in pieces of equal gate.
fn layer(
    cx: &Context,
    x: &WgpuTensor,
    w: &WgpuWeight,
    outputs: &[Output<'_>],
    gate: Option<(&WgpuTensor, &RowGroups)>,
    residual: Option<&WgpuTensor>,
) -> Result<()> {
    let matrix = &*w.matrix;
    let rows = x.shape().rows();
    if rows == 0 {
        return Ok(());
    }
    let [out, inner] = matrix.size;
    let prepared = prepare(cx, x, matrix.product)?;
    let input = match &prepared {
        None => Input::Matrix(x),
        Some([words, _]) if matches!(matrix.product, ProductKind::Int8(_)) => Input::Words(words),
        Some([rounded, _]) => Input::Matrix(rounded),
    };
    let product = Product {
        input,
        inner,
        out,
        columns: Some(&matrix.columns),
        row_scales: prepared.as_ref().map(|[_, scales]| scales),
        gate: None,
        residual,
        accumulate: false,
        scale: 1.0,
    };
    // Rows with the same gate are one launch.
    let pieces: Vec<(Option<Gate<'_>>, Range<usize>)> = match gate {
        None => vec![(None, 0..rows)],
        Some((gate, groups)) => {
            groups.ranges().enumerate().map(|(group, rows)| (Some((gate, group)), rows)).collect()
        }
    };
    for (gate, rows) in &pieces {
        Product { gate: *gate, ..product }.run(cx, &matrix.parts, outputs, rows.clone())?;
    }
    for delta in w.deltas.iter() {
        let low = WgpuTensor::new(cx, [rows, delta.rank], DType::F32)?;
        let plain = Product { row_scales: None, columns: None, residual: None, ..product };
        let down = Product { input: Input::Matrix(x), out: delta.rank, ..plain };
        down.run(cx, &delta.down, &[Output { tensor: &low, columns: 0..delta.rank }], 0..rows)?;
        let up = Product {
            input: Input::Matrix(&low),
            inner: delta.rank,
            accumulate: true,
            scale: delta.scale,
            ..plain
        };
        for (gate, rows) in &pieces {
            Product { gate: *gate, ..up }.run(cx, &delta.up, outputs, rows.clone())?;
        }
    }
    Ok(())
}

/// The rows as a quantized product multiplies them, and their scales.
fn prepare(cx: &Context, x: &WgpuTensor, product: ProductKind) -> Result<Option<[WgpuTensor; 2]>> {
    Ok(match product {
        ProductKind::Float => None,
        ProductKind::Int8(Rotation::None) => Some(quantize_rows(cx, x, Quantized::Int8)?),
        ProductKind::Int8(rotation) => {
            Some(quantize_rows(cx, &rotate_rows(cx, x, rotation)?, Quantized::Int8)?)
        }
        ProductKind::Rounded(format) => Some(quantize_rows(cx, x, format)?),
    })
}

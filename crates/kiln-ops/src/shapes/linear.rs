//! Shape checks of linear layers and their fused forms.

use kiln_tensor::{DType, LinearError, LoraDelta, Shape};

use super::check::Op;
use super::{ada_layer_norm, column_blocks, halves};
#[cfg(doc)]
use crate::Backend;
use crate::{Result, RowGroups, Tensor};

/// [`Backend::with_deltas`] of a layer of shape `[out, in]`.
pub fn with_deltas(deltas: &[LoraDelta], size: [usize; 2]) -> Result<()> {
    let fail = |e: LinearError| Op("with_deltas").fail(e.to_string());
    deltas.iter().try_for_each(|delta| delta.check(size)).or_else(fail)
}

/// [`Backend::linear`] with a weight of shape `[out, in]`.
pub fn linear(x: &impl Tensor, weight: [usize; 2]) -> Result<Shape> {
    let op = Op("linear");
    op.activation("x", x)?;
    let [out, cols] = weight;
    let [rows, _] = op.matrix("x", x.shape())?;
    op.shape("x", x.shape(), &[rows, cols])?;
    Ok([rows, out].into())
}

/// [`Backend::linear_split`] with a weight of shape `[out, in]`. Returns the shape of each result.
pub fn linear_split<const N: usize>(
    x: &impl Tensor,
    weight: [usize; 2],
    widths: &[usize; N],
) -> Result<[Shape; N]> {
    let op = Op("linear_split");
    op.activation("x", x)?;
    let [out, cols] = weight;
    let [rows, _] = op.matrix("x", x.shape())?;
    op.shape("x", x.shape(), &[rows, cols])?;
    let sum = op.sum("widths", widths.iter().copied())?;
    if sum != out {
        return op.fail(format!("the widths {widths:?} add up to {sum}, expected {out}"));
    }
    Ok(widths.map(|width| [rows, width].into()))
}

/// [`Backend::ada_linear_split`] with a weight of shape `[out, in]`. Returns rows and columns of the normalized `x`.
pub fn ada_linear_split<T: Tensor, const N: usize>(
    x: &T,
    [scale, shift]: [&T; 2],
    groups: &RowGroups,
    weight: [usize; 2],
    widths: &[usize; N],
) -> Result<[usize; 2]> {
    let shape = ada_layer_norm(x, scale, shift, groups)?;
    linear_split(x, weight, widths)?;
    Ok([shape.rows(), shape.last()])
}

/// [`Backend::linear_gated_add`] with a weight of shape `[out, in]`.
pub fn linear_gated_add<T: Tensor>(
    xs: &[&T],
    weight: [usize; 2],
    gate: Option<(&T, &RowGroups)>,
    residual: &T,
) -> Result<Shape> {
    let op = Op("linear_gated_add");
    let [out, cols] = weight;
    let [rows, width] = column_blocks(op, "xs", xs)?;
    if width != cols {
        return op.fail(format!("xs have {width} columns in total, expected {cols}"));
    }
    check_gated_add(op, [rows, out], gate, residual, xs[0].dtype())?;
    Ok([rows, out].into())
}

/// [`Backend::linear_swiglu`] with a weight of shape `[out, in]`.
pub fn linear_swiglu(x: &impl Tensor, weight: [usize; 2]) -> Result<Shape> {
    halves(&linear(x, weight)?)
}

/// [`Backend::ada_linear_swiglu`] with a weight of shape `[out, in]`.
pub fn ada_linear_swiglu<T: Tensor, const N: usize>(
    x: &T,
    modulation: [&T; 2],
    groups: &RowGroups,
    weight: [usize; 2],
    widths: &[usize; N],
) -> Result<()> {
    let [rows, _] = ada_linear_split(x, modulation, groups, weight, widths)?;
    widths.last().map_or(Ok(()), |&last| halves(&[rows, last].into()).map(drop))
}

/// Checks the residual and the gate of a product of shape `[rows, out]`.
fn check_gated_add<T: Tensor>(
    op: Op,
    [rows, out]: [usize; 2],
    gate: Option<(&T, &RowGroups)>,
    residual: &T,
    dtype: DType,
) -> Result<()> {
    op.same_dtype("residual", residual, dtype)?;
    op.shape("residual", residual.shape(), &[rows, out])?;
    if let Some((gate, groups)) = gate {
        op.groups(groups, rows)?;
        op.parameter("gate", gate, &[groups.count(), out])?;
    }
    Ok(())
}

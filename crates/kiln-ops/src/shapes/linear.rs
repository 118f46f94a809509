//! Linear layers: their updates, and what they meet.

use kiln_tensor::{DType, Delta, LinearError, Shape};

use super::check::Op;
use super::{ada_layer_norm, side_by_side, swiglu};
#[cfg(doc)]
use crate::Backend;
use crate::{Groups, Result, Tensor};

/// [`Backend::with_deltas`] of a layer of `[out, in]`.
pub fn with_deltas(updates: &[Delta], size: [usize; 2]) -> Result<()> {
    let refuse = |e: LinearError| Op("with_deltas").fail(e.to_string());
    updates.iter().try_for_each(|delta| delta.check(size)).or_else(refuse)
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

/// [`Backend::linear_split`] with a weight of shape `[out, in]`. Gives the shape of each result.
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

/// [`Backend::ada_linear_split`] with a weight of shape `[out, in]`: rows and columns of what is normalised.
pub fn ada_linear_split<T: Tensor, const N: usize>(
    x: &T,
    [scale, shift]: [&T; 2],
    groups: &Groups,
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
    gate: Option<(&T, &Groups)>,
    residual: &T,
) -> Result<Shape> {
    let op = Op("linear_gated_add");
    let [out, cols] = weight;
    let [rows, width] = side_by_side(op, "xs", xs)?;
    if width != cols {
        return op.fail(format!("xs are {width} columns wide together, expected {cols}"));
    }
    added(op, [rows, out], gate, residual, xs[0].dtype())?;
    Ok([rows, out].into())
}

/// [`Backend::swiglu_gated_add`] with a weight of shape `[out, in]`: rows and columns of the result.
pub fn swiglu_gated_add<T: Tensor>(
    beside: Option<&T>,
    gate_up: &T,
    weight: [usize; 2],
    gate: Option<(&T, &Groups)>,
    residual: &T,
) -> Result<[usize; 2]> {
    let op = Op("swiglu_gated_add");
    let [rows, width] = op.matrix("gate_up", &swiglu(gate_up)?)?;
    let mut cols = width;
    if let Some(beside) = beside {
        op.like("beside", beside, gate_up.dtype())?;
        let [beside_rows, beside_cols] = op.matrix("beside", beside.shape())?;
        if beside_rows != rows {
            return op.fail(format!("beside has {beside_rows} rows, expected {rows}"));
        }
        cols += beside_cols;
    }
    let [out, expected] = weight;
    if cols != expected {
        return op.fail(format!("the inputs are {cols} columns wide together, expected {expected}"));
    }
    added(op, [rows, out], gate, residual, gate_up.dtype())?;
    Ok([rows, out])
}

/// What a product of this size is added to, and its gate.
fn added<T: Tensor>(
    op: Op,
    [rows, out]: [usize; 2],
    gate: Option<(&T, &Groups)>,
    residual: &T,
    dtype: DType,
) -> Result<()> {
    op.like("residual", residual, dtype)?;
    op.shape("residual", residual.shape(), &[rows, out])?;
    if let Some((gate, groups)) = gate {
        op.groups(groups, rows)?;
        op.parameter("gate", gate, &[groups.count(), out])?;
    }
    Ok(())
}

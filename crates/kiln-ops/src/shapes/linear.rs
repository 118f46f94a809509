//! Linear layers: their parts, and what they meet.

use kiln_tensor::{DType, Delta, LinearParts, Shape};

use super::check::Op;
use super::{ada_layer_norm, side_by_side, swiglu};
#[cfg(doc)]
use crate::Backend;
use crate::int8::MOST_COLUMNS;
use crate::{Groups, Result, Tensor};

/// [`Backend::weight`]: slabs of equal width, a bias and deltas that fit them. Gives `[out, in]`.
pub fn weight(parts: &LinearParts) -> Result<[usize; 2]> {
    let op = Op("weight");
    let Some(first) = parts.shapes().next() else {
        return op.fail("there are no slabs".into());
    };
    if !parts.slabs.is_empty() && !parts.packed.is_empty() {
        return op.fail("there are both slabs and packed matrices".into());
    }
    let [_, cols] = op.rank("slab 0", first, "[out, in]")?;
    let mut heights = Vec::new();
    for (i, shape) in parts.shapes().enumerate() {
        let [height, width] = op.rank(&format!("slab {i}"), shape, "[out, in]")?;
        if width != cols {
            return op.fail(format!("slab {i} has shape {shape}, expected [{height}, {cols}]"));
        }
        heights.push(height);
    }
    let dtype = parts.dtype().unwrap_or(DType::F32);
    if let Some(i) = parts.slabs.iter().position(|slab| slab.dtype() != dtype) {
        return op.fail(format!("slab {i} is {}, expected {dtype} like slab 0", parts.slabs[i].dtype()));
    }
    let integers = dtype == DType::I8;
    if integers && parts.fp8 {
        return op.fail("slabs of i8 can't be multiplied in 8-bit floats".into());
    }
    let (found, expected) = (parts.scales.len(), if integers { heights.len() } else { 0 });
    if found != expected {
        return op.fail(format!("{found} scales for slabs of {dtype}, expected {expected}"));
    }
    for (i, (scale, &height)) in parts.scales.iter().zip(&heights).enumerate() {
        op.shape(&format!("scale {i}"), scale.shape(), &[height])?;
        if !matches!(scale.dtype(), DType::F32 | DType::BF16 | DType::F16 | DType::F64) {
            return op.fail(format!("scale {i} is {}, expected a float type", scale.dtype()));
        }
    }
    let rows = op.sum("rows of the slabs", heights)?;
    if rows == 0 || cols == 0 {
        return op.fail(format!("the weight has shape [{rows}, {cols}], expected at least one element"));
    }
    if integers && cols > MOST_COLUMNS {
        return op.fail(format!("an i8 weight has {cols} columns, expected at most {MOST_COLUMNS}"));
    }
    if let Some(bias) = &parts.bias {
        op.shape("bias", bias.shape(), &[rows])?;
    }
    deltas(op, &parts.deltas, [rows, cols])?;
    Ok([rows, cols])
}

/// [`Backend::with_deltas`] of a layer of `[out, in]`.
pub fn with_deltas(updates: &[Delta], size: [usize; 2]) -> Result<()> {
    deltas(Op("with_deltas"), updates, size)
}

fn deltas(op: Op, deltas: &[Delta], [rows, cols]: [usize; 2]) -> Result<()> {
    for (i, delta) in deltas.iter().enumerate() {
        let (down, up) = (format!("down of delta {i}"), format!("up of delta {i}"));
        let [rank, _] = op.rank(&down, delta.down.shape(), "[rank, in]")?;
        op.shape(&down, delta.down.shape(), &[rank, cols])?;
        let [height, _] = op.rank(&up, delta.up.shape(), "[out, rank]")?;
        op.shape(&up, delta.up.shape(), &[height, rank])?;
        if delta.row.checked_add(height).is_none_or(|end| end > rows) {
            return op.fail(format!(
                "delta {i} changes {height} rows from row {}, but there are only {rows}",
                delta.row
            ));
        }
    }
    Ok(())
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

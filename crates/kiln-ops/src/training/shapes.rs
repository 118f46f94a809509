//! Shape checks of training operations: one function per operation that checks its arguments and returns the shape of its
//! result, as in [`crate::shapes`].

use kiln_tensor::{DType, Shape};

use super::{AdamWTensor, LowRank, ProdigyTensor, Quantized8, QuantizedAdamWTensor};
use crate::shapes::{AttentionSize, Op, attention as attention_shape, column_blocks, row_blocks, same_shape};
use crate::{AttentionSpec, Result, RopeTable, RowGroups, Tensor, shapes};
#[cfg(doc)]
use crate::{Backend, TrainingBackend};

fn added<T: Tensor>(op: Op, add: Option<&T>, dtype: DType, dims: &[usize]) -> Result<()> {
    let Some(add) = add else { return Ok(()) };
    op.same_dtype("add", add, dtype)?;
    op.shape("add", add.shape(), dims)
}

/// [`TrainingBackend::split_columns`].
pub fn split_columns(x: &impl Tensor, widths: &[usize]) -> Result<Vec<Shape>> {
    let op = Op("split_columns");
    op.activation("x", x)?;
    let [rows, cols] = op.matrix("x", x.shape())?;
    let sum = op.sum("widths", widths.iter().copied())?;
    if sum != cols {
        return op.fail(format!("the widths {widths:?} add up to {sum}, expected {cols}"));
    }
    Ok(widths.iter().map(|&width| [rows, width].into()).collect())
}

/// [`TrainingBackend::linear_backward`] with a weight of shape `[out, in]` and this many LoRA deltas.
pub fn linear_backward<T: Tensor>(
    dys: &[&T],
    weight: [usize; 2],
    deltas: usize,
    add: Option<&T>,
) -> Result<Shape> {
    let op = Op("linear_backward");
    let [out, cols] = weight;
    let [rows, width] = column_blocks(op, "dys", dys)?;
    if width != out {
        return op.fail(format!("dys have {width} columns in total, expected {out}"));
    }
    if deltas > 0 {
        return op.fail(format!("the weight has {deltas} LoRA deltas, expected none"));
    }
    added(op, add, dys[0].dtype(), &[rows, cols])?;
    Ok([rows, cols].into())
}

/// [`TrainingBackend::matmul_nt`].
pub fn matmul_nt<T: Tensor>(x: &T, w: &T, add: Option<&T>) -> Result<Shape> {
    let op = Op("matmul_nt");
    let dtype = op.activation("x", x)?;
    let ([rows, cols], [out, _]) = (op.matrix("x", x.shape())?, op.matrix("w", w.shape())?);
    op.parameter("w", w, &[out, cols])?;
    added(op, add, dtype, &[rows, out])?;
    Ok([rows, out].into())
}

/// [`TrainingBackend::matmul_nn`].
pub fn matmul_nn<T: Tensor>(dy: &T, w: &T, add: Option<&T>) -> Result<Shape> {
    let op = Op("matmul_nn");
    let dtype = op.activation("dy", dy)?;
    let ([rows, out], [_, cols]) = (op.matrix("dy", dy.shape())?, op.matrix("w", w.shape())?);
    op.parameter("w", w, &[out, cols])?;
    added(op, add, dtype, &[rows, cols])?;
    Ok([rows, cols].into())
}

/// [`TrainingBackend::matmul_tn`].
pub fn matmul_tn<T: Tensor>(dy: &T, x: &T, add: Option<&T>) -> Result<Shape> {
    let op = Op("matmul_tn");
    let dtype = op.activation("dy", dy)?;
    op.same_dtype("x", x, dtype)?;
    let ([rows, out], [_, cols]) = (op.matrix("dy", dy.shape())?, op.matrix("x", x.shape())?);
    op.shape("x", x.shape(), &[rows, cols])?;
    added(op, add, DType::F32, &[out, cols])?;
    Ok([out, cols].into())
}

/// The updates of a layer with `out` outputs, whose input is `x`.
pub fn low_rank<T: Tensor>(x: &T, updates: &[LowRank<'_, T>], out: usize) -> Result<()> {
    let op = Op("linear_low_rank");
    for update in updates {
        let [rank, cols] = op.matrix("down", update.down.shape())?;
        let [n, _] = op.matrix("up", update.up.shape())?;
        let [rows, _] = op.matrix("x", x.shape())?;
        op.parameter("down", update.down, &[rank, cols])?;
        op.parameter("up", update.up, &[n, rank])?;
        let input = update.input.unwrap_or(x);
        op.same_dtype("the input", input, x.dtype())?;
        op.shape("the input", input.shape(), &[rows, cols])?;
        if op.sum("columns", [update.first, n])? > out {
            return op
                .fail(format!("an update of {n} columns from {} on exceeds {out} columns", update.first));
        }
    }
    Ok(())
}

/// [`TrainingBackend::row_norms`] with a weight of shape `[out, in]`.
pub fn row_norms<T: Tensor>(weight: [usize; 2], updates: &[LowRank<'_, T>]) -> Result<Shape> {
    let op = Op("row_norms");
    let [out, cols] = weight;
    for update in updates {
        let [rank, _] = op.matrix("down", update.down.shape())?;
        let [n, _] = op.matrix("up", update.up.shape())?;
        op.parameter("down", update.down, &[rank, cols])?;
        op.parameter("up", update.up, &[n, rank])?;
        if op.sum("rows", [update.first, n])? > out {
            return op.fail(format!("an update of {n} rows from {} on exceeds {out} rows", update.first));
        }
    }
    Ok([out].into())
}

/// [`TrainingBackend::mix_rows`]. Returns the shape of the result, and the numbers of rows of a block of `x` and of the result.
pub fn mix_rows<T: Tensor>(x: &T, a: &T, transposed: bool) -> Result<(Shape, [usize; 2])> {
    let op = Op("mix_rows");
    op.activation("x", x)?;
    let ([rows, dim], [out, cols]) = (op.matrix("x", x.shape())?, op.matrix("a", a.shape())?);
    op.parameter("a", a, &[out, cols])?;
    let [from, to] = if transposed { [out, cols] } else { [cols, out] };
    if from == 0 || rows % from != 0 {
        return op.fail(format!("x has {rows} rows, expected a multiple of {from}"));
    }
    Ok(([rows / from * to, dim].into(), [from, to]))
}

/// [`TrainingBackend::mix_rows_gradient`].
pub fn mix_rows_gradient<T: Tensor>(dy: &T, x: &T, size: [usize; 2], add: Option<&T>) -> Result<Shape> {
    let op = Op("mix_rows_gradient");
    let dtype = op.activation("dy", dy)?;
    op.same_dtype("x", x, dtype)?;
    let ([dy_rows, dim], [x_rows, _]) = (op.matrix("dy", dy.shape())?, op.matrix("x", x.shape())?);
    op.shape("x", x.shape(), &[x_rows, dim])?;
    let [out, cols] = size;
    if out == 0 || cols == 0 || dy_rows % out != 0 || x_rows % cols != 0 || dy_rows / out != x_rows / cols {
        return op.fail(format!(
            "dy has {dy_rows} rows and x {x_rows}, expected equal numbers of blocks of {out} and {cols}"
        ));
    }
    added(op, add, DType::F32, &size)?;
    Ok(size.into())
}

/// [`TrainingBackend::column_dot`].
pub fn column_dot<T: Tensor>(x: &T, y: &T, add: Option<&T>) -> Result<Shape> {
    let op = Op("column_dot");
    let [_, dim] = op.matrix("x", x.shape())?;
    same_shape(op, ["x", "y"], x, y)?;
    added(op, add, DType::F32, &[dim])?;
    Ok([dim].into())
}

/// [`TrainingBackend::dropout`].
pub fn dropout(x: &impl Tensor, rate: f32) -> Result<Shape> {
    let op = Op("dropout");
    op.activation("x", x)?;
    if !(0.0..1.0).contains(&rate) {
        return op.fail(format!("the rate is {rate}, expected at least 0 and below 1"));
    }
    Ok(x.shape().clone())
}

/// [`TrainingBackend::ada_layer_norm_backward`].
pub fn ada_layer_norm_backward<T: Tensor>(
    dy: &T,
    x: &T,
    scale: &T,
    groups: &RowGroups,
    add: Option<&T>,
) -> Result<Shape> {
    let op = Op("ada_layer_norm_backward");
    let shape = same_shape(op, ["dy", "x"], dy, x)?;
    let [rows, dim] = op.matrix("x", x.shape())?;
    op.groups(groups, rows)?;
    op.parameter("scale", scale, &[groups.count(), dim])?;
    added(op, add, dy.dtype(), shape.dims())?;
    Ok(shape)
}

/// [`TrainingBackend::norm_rope_backward`]. Returns tokens, heads and head width.
pub fn norm_rope_backward<T: Tensor>(
    dy: &T,
    x: &T,
    weight: Option<&T>,
    rope: &RopeTable<T>,
) -> Result<[usize; 3]> {
    same_shape(Op("norm_rope_backward"), ["dy", "x"], dy, x)?;
    shapes::norm_rope(x, weight, rope)
}

/// [`TrainingBackend::swiglu_backward`].
pub fn swiglu_backward<T: Tensor>(dy: &T, x: &T) -> Result<Shape> {
    let op = Op("swiglu_backward");
    let shape = shapes::swiglu(x)?;
    op.same_dtype("dy", dy, x.dtype())?;
    op.shape("dy", dy.shape(), shape.dims())?;
    Ok(x.shape().clone())
}

/// [`TrainingBackend::concat_swiglu`].
pub fn concat_swiglu<T: Tensor>(left: &T, x: &T) -> Result<()> {
    let op = Op("concat_swiglu");
    let shape = shapes::swiglu(x)?;
    op.same_dtype("left", left, x.dtype())?;
    let [_, cols] = op.matrix("left", left.shape())?;
    op.shape("left", left.shape(), &[shape.rows(), cols])
}

/// [`TrainingBackend::concat_swiglu_backward`]. Returns the widths of both parts of `dy`.
pub fn concat_swiglu_backward<T: Tensor>(dy: &T, x: &T) -> Result<(usize, usize)> {
    let op = Op("concat_swiglu_backward");
    let shape = shapes::swiglu(x)?;
    op.same_dtype("dy", dy, x.dtype())?;
    let [_, cols] = op.matrix("dy", dy.shape())?;
    op.shape("dy", dy.shape(), &[shape.rows(), cols])?;
    match cols.checked_sub(shape.last()) {
        Some(left) => Ok((left, shape.last())),
        None => op.fail(format!("dy has {cols} columns, expected at least {}", shape.last())),
    }
}

/// [`TrainingBackend::gate_rows`].
pub fn gate_rows<T: Tensor>(x: &T, gate: &T, groups: &RowGroups) -> Result<Shape> {
    let op = Op("gate_rows");
    op.activation("x", x)?;
    let [rows, dim] = op.matrix("x", x.shape())?;
    op.groups(groups, rows)?;
    op.parameter("gate", gate, &[groups.count(), dim])?;
    Ok(x.shape().clone())
}

/// [`TrainingBackend::attention_backward`].
pub fn attention_backward<T: Tensor>(
    dout: &[&T],
    q: &[&T],
    k: &[&T],
    v: &[&T],
    out: &T,
    lse: &T,
    spec: &AttentionSpec,
) -> Result<AttentionSize> {
    let op = Op("attention_backward");
    let size = attention_shape(q, k, v, spec)?;
    let expected = size.result();
    let [rows, cols] = row_blocks(op, "dout", dout, Some(q[0].dtype()))?;
    op.shape("dout", &[rows, cols].into(), expected.dims())?;
    op.same_dtype("out", out, q[0].dtype())?;
    op.shape("out", out.shape(), expected.dims())?;
    op.parameter("lse", lse, &[size.queries, size.heads])?;
    Ok(size)
}

/// [`TrainingBackend::squared_error`].
pub fn squared_error<T: Tensor>(x: &T, y: &T) -> Result<Shape> {
    same_shape(Op("squared_error"), ["x", "y"], x, y)
}

/// [`TrainingBackend::sum_squares`].
pub fn sum_squares<T: Tensor>(xs: &[&T]) -> Result<()> {
    let op = Op("sum_squares");
    xs.iter().try_for_each(|x| op.parameter("x", *x, x.shape().dims()))
}

/// [`TrainingBackend::adamw`].
pub fn adamw<T: Tensor>(tensors: &[AdamWTensor<'_, T>]) -> Result<()> {
    let op = Op("adamw");
    tensors.iter().try_for_each(|t| {
        let dims = t.param.shape().dims();
        op.parameter("param", &*t.param, dims)?;
        op.parameter("grad", t.grad, dims)?;
        op.parameter("m", &*t.m, dims)?;
        op.parameter("v", &*t.v, dims)
    })
}

/// [`TrainingBackend::adamw_8bit`], with the number of elements of each state.
pub fn adamw_8bit<T: Tensor, Q>(
    tensors: &[QuantizedAdamWTensor<'_, T, Q>],
    elements: impl Fn(&Q) -> usize,
) -> Result<()> {
    let op = Op("adamw_8bit");
    tensors.iter().try_for_each(|t| {
        let dims = t.param.shape().dims();
        op.parameter("param", &*t.param, dims)?;
        op.parameter("grad", t.grad, dims)?;
        let expected = t.param.shape().numel();
        for (name, state) in [("m", &*t.m), ("v", &*t.v)] {
            let found = elements(state);
            if found != expected {
                return op.fail(format!("{name} has {found} elements, expected {expected}"));
            }
        }
        Ok(())
    })
}

/// [`TrainingBackend::upload_quantized`].
pub fn upload_quantized(host: &Quantized8) -> Result<()> {
    let (blocks, expected) = (host.scales.len(), host.codes.len().div_ceil(super::BLOCK));
    if blocks != expected {
        let codes = host.codes.len();
        return Op("upload_quantized")
            .fail(format!("{codes} codes with {blocks} scales, expected {expected}"));
    }
    Ok(())
}

/// [`TrainingBackend::prodigy_moments`] and [`TrainingBackend::prodigy_update`].
pub fn prodigy<T: Tensor>(tensors: &[ProdigyTensor<'_, T>]) -> Result<()> {
    let op = Op("prodigy");
    tensors.iter().try_for_each(|t| {
        let dims = t.param.shape().dims();
        let all = [("param", &*t.param), ("grad", t.grad), ("start", t.start), ("m", &*t.m), ("v", &*t.v)];
        all.into_iter().try_for_each(|(name, tensor)| op.parameter(name, tensor, dims))?;
        op.parameter("s", &*t.s, dims)
    })
}

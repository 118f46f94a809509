//! Products through frozen weights, and those of adapters with their gradients.

use kiln_tensor::{DType, HostTensor};

use crate::Result;
use crate::reference::linear::Linear;
use crate::reference::movement;
use crate::reference::values::{plus, tensor, values};
use crate::training::shapes;
use crate::training::{LowRank, keeps};

type T = HostTensor;

/// `x · w` of `[rows, inner]` and `[inner, cols]`.
fn product(x: &[f64], w: &[f64], inner: usize, cols: usize) -> Vec<f64> {
    let rows = x.len() / inner.max(1);
    let mut y = vec![0.0; rows * cols];
    for row in 0..rows {
        for i in 0..inner {
            for col in 0..cols {
                y[row * cols + col] += x[row * inner + i] * w[i * cols + col];
            }
        }
    }
    y
}

fn transpose(x: &[f64], cols: usize) -> Vec<f64> {
    let rows = x.len() / cols.max(1);
    (0..cols).flat_map(|col| (0..rows).map(move |row| x[row * cols + col])).collect()
}

fn scaled(y: Vec<f64>, scale: f32, add: Option<&T>) -> Result<Vec<f64>> {
    plus(y.into_iter().map(|y| f64::from(scale) * y).collect(), add)
}

pub(crate) fn split_columns(x: &T, widths: &[usize]) -> Result<Vec<T>> {
    let shapes = shapes::split_columns(x, widths)?;
    let (x_values, cols) = (values(x)?, x.shape().last());
    let mut first = 0;
    let mut parts = Vec::with_capacity(widths.len());
    for shape in shapes {
        let width = shape.last();
        let part = x_values.chunks(cols.max(1)).flat_map(|row| &row[first..first + width]).copied();
        parts.push(tensor(shape, x.dtype(), part.collect())?);
        first += width;
    }
    Ok(parts)
}

pub(crate) fn linear_backward(dys: &[&T], w: &Linear, add: Option<&T>) -> Result<T> {
    let (size @ [out, cols], deltas) = w.size();
    let shape = shapes::linear_backward(dys, size, deltas, add)?;
    let dy = values(&movement::concat_columns(dys)?)?;
    let dx = match w.fp8_gradient(&dy) {
        Some(dx) => dx,
        None => product(&dy, &w.weight_values(), out, cols),
    };
    tensor(shape, dys[0].dtype(), plus(dx, add)?)
}

pub(crate) fn matmul_nt(x: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
    let shape = shapes::matmul_nt(x, w, add)?;
    let inner = x.shape().last();
    let y = product(&values(x)?, &transpose(&values(w)?, inner), inner, shape.last());
    tensor(shape, x.dtype(), scaled(y, scale, add)?)
}

pub(crate) fn matmul_nn(dy: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
    let shape = shapes::matmul_nn(dy, w, add)?;
    let dx = product(&values(dy)?, &values(w)?, dy.shape().last(), shape.last());
    tensor(shape, dy.dtype(), scaled(dx, scale, add)?)
}

pub(crate) fn matmul_tn(dy: &T, x: &T, scale: f32, add: Option<&T>) -> Result<T> {
    let shape = shapes::matmul_tn(dy, x, add)?;
    let rows = x.shape().rows();
    let dw = if rows == 0 {
        vec![0.0; shape.numel()]
    } else {
        product(&transpose(&values(dy)?, dy.shape().last()), &values(x)?, rows, shape.last())
    };
    tensor(shape, DType::F32, scaled(dw, scale, add)?)
}

pub(crate) fn row_norms(w: &Linear, updates: &[LowRank<'_, T>]) -> Result<T> {
    let (size @ [_, cols], _) = w.size();
    let shape = shapes::row_norms(size, updates)?;
    let mut sum = w.weight_values();
    for update in updates {
        let change = product(&values(update.up)?, &values(update.down)?, update.down.shape().rows(), cols);
        let rows = &mut sum[update.first * cols..][..change.len()];
        rows.iter_mut().zip(change).for_each(|(sum, change)| *sum += f64::from(update.scale) * change);
    }
    let norm = |row: &[f64]| row.iter().map(|v| v * v).sum::<f64>().sqrt();
    tensor(shape, DType::F32, sum.chunks(cols).map(norm).collect())
}

pub(crate) fn mix_rows(x: &T, a: &T, transposed: bool) -> Result<T> {
    let (shape, [from, to]) = shapes::mix_rows(x, a, transposed)?;
    let a_values = values(a)?;
    let a = if transposed { transpose(&a_values, a.shape().last()) } else { a_values };
    let (x_values, dim) = (values(x)?, shape.last());
    let blocks = x_values.chunks((from * dim).max(1));
    let y: Vec<f64> = blocks.flat_map(|block| product(&a, block, from, dim)).collect();
    debug_assert_eq!(y.len(), x_values.len() / from * to);
    tensor(shape, x.dtype(), y)
}

pub(crate) fn mix_rows_gradient(dy: &T, x: &T, size: [usize; 2], scale: f32, add: Option<&T>) -> Result<T> {
    let shape = shapes::mix_rows_gradient(dy, x, size, add)?;
    let ([out, cols], dim) = (size, dy.shape().last());
    let mut da = vec![0.0; out * cols];
    let (dy_values, x_values) = (values(dy)?, values(x)?);
    for (dy, x) in dy_values.chunks((out * dim).max(1)).zip(x_values.chunks((cols * dim).max(1))) {
        let block = product(dy, &transpose(x, dim), dim, cols);
        da.iter_mut().zip(block).for_each(|(da, block)| *da += block);
    }
    tensor(shape, DType::F32, scaled(da, scale, add)?)
}

pub(crate) fn column_dot(x: &T, y: &T, add: Option<&T>) -> Result<T> {
    let shape = shapes::column_dot(x, y, add)?;
    let mut sums = vec![0.0; shape.numel()];
    for (i, (x, y)) in values(x)?.into_iter().zip(values(y)?).enumerate() {
        sums[i % shape.numel()] += x * y;
    }
    tensor(shape, DType::F32, plus(sums, add)?)
}

pub(crate) fn dropout(x: &HostTensor, rate: f32, seed: u64) -> Result<T> {
    let shape = shapes::dropout(x, rate)?;
    let factor = 1.0 / (1.0 - f64::from(rate));
    let kept = |(i, x)| if keeps(seed, i as u64, rate) { x * factor } else { 0.0 };
    tensor(shape, x.dtype(), values(x)?.into_iter().enumerate().map(kept).collect())
}

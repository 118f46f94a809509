//! Gradients of norms and element-wise operations, and the loss.

use kiln_tensor::{DType, HostTensor};

use crate::reference::norm::{inverse_rms, moments};
use crate::reference::values::{plus, tensor, values};
use crate::training::shapes;
use crate::{Result, RopeLayout, RopeTable, RowGroups};

type T = HostTensor;

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

pub(crate) fn ada_layer_norm_backward(
    dy: &T,
    x: &T,
    scale: &T,
    groups: &RowGroups,
    eps: f32,
    add: Option<&T>,
) -> Result<T> {
    let shape = shapes::ada_layer_norm_backward(dy, x, scale, groups, add)?;
    let (dy_values, x_values, scale, dim) = (values(dy)?, values(x)?, values(scale)?, shape.last().max(1));
    let mut dx = Vec::with_capacity(shape.numel());
    for (row, (dy, x)) in dy_values.chunks(dim).zip(x_values.chunks(dim)).enumerate() {
        let (average, variance) = moments(x.iter().copied());
        let r = 1.0 / (variance + f64::from(eps)).sqrt();
        let scale = &scale[groups.group_of(row) * dim..][..dim];
        let n: Vec<f64> = x.iter().map(|x| (x - average) * r).collect();
        let g: Vec<f64> = dy.iter().zip(scale).map(|(dy, scale)| dy * (1.0 + scale)).collect();
        let (mean_g, mean_gn) = (mean(g.iter().copied()), mean(g.iter().zip(&n).map(|(g, n)| g * n)));
        dx.extend(g.iter().zip(&n).map(|(g, n)| r * (g - mean_g - n * mean_gn)));
    }
    tensor(shape, dy.dtype(), plus(dx, add)?)
}

pub(crate) fn norm_rope_backward(
    dy: &T,
    x: &T,
    weight: Option<&T>,
    rope: &RopeTable<T>,
    eps: f32,
) -> Result<T> {
    let [_, heads, head_dim] = shapes::norm_rope_backward(dy, x, weight, rope)?;
    let (dy_values, x_values, weight) = (values(dy)?, values(x)?, weight.map(values).transpose()?);
    let (cos, sin, half) = (values(&rope.cos)?, values(&rope.sin)?, head_dim / 2);
    let mut dx = Vec::with_capacity(x_values.len());
    for (i, (dy, x)) in dy_values.chunks(head_dim).zip(x_values.chunks(head_dim)).enumerate() {
        let token = i / heads;
        let mut g = dy.to_vec();
        for pair in 0..half {
            let (first, second) = match rope.pairs {
                RopeLayout::Interleaved => (2 * pair, 2 * pair + 1),
                RopeLayout::HalfSplit => (pair, pair + half),
            };
            let (a, b) = (g[first], g[second]);
            let (cos, sin) = (cos[token * half + pair], sin[token * half + pair]);
            g[first] = a * cos + b * sin;
            g[second] = b * cos - a * sin;
        }
        if let Some(weight) = &weight {
            g.iter_mut().zip(weight).for_each(|(g, weight)| *g *= weight);
            let r = inverse_rms(x, eps);
            let mean_gn = mean(g.iter().zip(x).map(|(g, x)| g * x * r));
            g.iter_mut().zip(x).for_each(|(g, x)| *g = r * (*g - x * r * mean_gn));
        }
        dx.extend(g);
    }
    tensor(x.shape(), dy.dtype(), dx)
}

pub(crate) fn swiglu_backward(dy: &T, x: &T) -> Result<T> {
    let shape = shapes::swiglu_backward(dy, x)?;
    let (dy_values, x_values, n) = (values(dy)?, values(x)?, dy.shape().last().max(1));
    let mut dx = Vec::with_capacity(shape.numel());
    for (dy, x) in dy_values.chunks(n).zip(x_values.chunks(2 * n)) {
        let (a, u) = x.split_at(n);
        let sigmoid = |a: f64| 1.0 / (1.0 + (-a).exp());
        dx.extend((0..n).map(|i| dy[i] * u[i] * sigmoid(a[i]) * (1.0 + a[i] * (1.0 - sigmoid(a[i])))));
        dx.extend((0..n).map(|i| dy[i] * a[i] * sigmoid(a[i])));
    }
    tensor(shape, dy.dtype(), dx)
}

pub(crate) fn gate_rows(x: &T, gate: &T, groups: &RowGroups) -> Result<T> {
    let shape = shapes::gate_rows(x, gate, groups)?;
    let (gate, dim) = (values(gate)?, shape.last());
    let gated = |(i, x): (usize, f64)| gate[groups.group_of(i / dim) * dim + i % dim] * x;
    tensor(shape, x.dtype(), values(x)?.into_iter().enumerate().map(gated).collect())
}

pub(crate) fn squared_error(x: &T, y: &T, scale: f32) -> Result<[T; 2]> {
    let shape = shapes::squared_error(x, y)?;
    let scale = f64::from(scale);
    let difference: Vec<f64> = values(x)?.into_iter().zip(values(y)?).map(|(x, y)| x - y).collect();
    let loss = scale * difference.iter().map(|d| d * d).sum::<f64>();
    let dx = difference.into_iter().map(|d| 2.0 * scale * d).collect();
    Ok([tensor([1, 1], DType::F32, vec![loss])?, tensor(shape, x.dtype(), dx)?])
}

pub(crate) fn sum_squares(xs: &[&T]) -> Result<T> {
    shapes::sum_squares(xs)?;
    let mut sum = 0.0;
    for x in xs {
        sum += values(x)?.into_iter().map(|x| x * x).sum::<f64>();
    }
    tensor([1, 1], DType::F32, vec![sum])
}

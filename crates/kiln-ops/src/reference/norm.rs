//! Norms, with modulation, rotary embedding or activation.

use kiln_tensor::HostTensor;

use super::elementwise::apply;
use super::values::{tensor, values};
use crate::{Activation, Result, RopeLayout, RopeTable, RowGroups, shapes};

/// Mean and biased variance.
pub(super) fn moments(x: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = x.clone().count() as f64;
    let mean = x.clone().sum::<f64>() / count;
    (mean, x.map(|v| (v - mean).powi(2)).sum::<f64>() / count)
}

/// `1 / sqrt(mean(x²) + eps)`.
pub(super) fn inverse_rms(x: &[f64], eps: f32) -> f64 {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    1.0 / (mean + f64::from(eps)).sqrt()
}

pub(super) fn rms_norm(x: &HostTensor, weight: &HostTensor, eps: f32) -> Result<HostTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let (x_values, weight) = (values(x)?, values(weight)?);
    let mut out = Vec::with_capacity(shape.numel());
    for row in x_values.chunks(shape.last().max(1)) {
        let factor = inverse_rms(row, eps);
        out.extend(row.iter().zip(&weight).map(|(x, weight)| x * factor * weight));
    }
    tensor(shape, x.dtype(), out)
}

pub(super) fn ada_layer_norm(
    x: &HostTensor,
    scale: &HostTensor,
    shift: &HostTensor,
    groups: &RowGroups,
    eps: f32,
) -> Result<HostTensor> {
    let shape = shapes::ada_layer_norm(x, scale, shift, groups)?;
    let (x_values, scale, shift, dim) = (values(x)?, values(scale)?, values(shift)?, shape.last());
    let mut out = Vec::with_capacity(shape.numel());
    for (row, x) in x_values.chunks(dim.max(1)).enumerate() {
        let (mean, variance) = moments(x.iter().copied());
        let first = groups.group_of(row) * dim;
        for (column, x) in x.iter().enumerate() {
            let normed = (x - mean) / (variance + f64::from(eps)).sqrt();
            out.push(normed * (1.0 + scale[first + column]) + shift[first + column]);
        }
    }
    tensor(shape, x.dtype(), out)
}

pub(super) fn norm_rope(
    x: &HostTensor,
    weight: Option<&HostTensor>,
    rope: &RopeTable<HostTensor>,
    eps: f32,
) -> Result<HostTensor> {
    let [_, heads, head_dim] = shapes::norm_rope(x, weight, rope)?;
    let (x_values, weight) = (values(x)?, weight.map(values).transpose()?);
    let (cos, sin, half) = (values(&rope.cos)?, values(&rope.sin)?, head_dim / 2);
    let mut out = Vec::with_capacity(x_values.len());
    for (i, head) in x_values.chunks(head_dim).enumerate() {
        let token = i / heads;
        let mut rotated = head.to_vec();
        if let Some(weight) = &weight {
            let factor = inverse_rms(head, eps);
            rotated.iter_mut().zip(weight).for_each(|(x, weight)| *x *= factor * weight);
        }
        for pair in 0..half {
            let (first, second) = match rope.pairs {
                RopeLayout::Interleaved => (2 * pair, 2 * pair + 1),
                RopeLayout::HalfSplit => (pair, pair + half),
            };
            let (a, b) = (rotated[first], rotated[second]);
            let (cos, sin) = (cos[token * half + pair], sin[token * half + pair]);
            rotated[first] = a * cos - b * sin;
            rotated[second] = a * sin + b * cos;
        }
        out.extend(rotated);
    }
    tensor(x.shape(), x.dtype(), out)
}

pub(super) fn group_norm(
    x: &HostTensor,
    groups: usize,
    weight: &HostTensor,
    bias: &HostTensor,
    eps: f32,
    f: Option<Activation>,
) -> Result<HostTensor> {
    let shape = shapes::group_norm(x, groups, weight, bias)?;
    let (x_values, weight, bias, channels) = (values(x)?, values(weight)?, values(bias)?, shape.last());
    let width = channels / groups;
    let group_of = |i: usize| i % channels / width;
    let stats: Vec<_> = (0..groups)
        .map(|group| {
            let rows = x_values.chunks_exact(channels);
            moments(rows.flat_map(|row| row[group * width..][..width].iter().copied()))
        })
        .collect();
    let out = x_values.iter().enumerate().map(|(i, x)| {
        let (mean, variance) = stats[group_of(i)];
        let y = (x - mean) / (variance + f64::from(eps)).sqrt() * weight[i % channels] + bias[i % channels];
        f.map_or(y, |f| apply(f, y))
    });
    tensor(shape, x.dtype(), out.collect())
}

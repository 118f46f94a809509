use kiln_tensor::HostTensor;

use super::{tensor, values};
use crate::{Result, shapes};

pub(super) fn concat_rows(parts: &[&HostTensor]) -> Result<HostTensor> {
    let shape = shapes::concat_rows(parts)?;
    let mut out = Vec::with_capacity(shape.numel());
    for part in parts {
        out.extend(values(part)?);
    }
    tensor(shape, parts[0].dtype(), out)
}

/// A copy of `x` with these rows from row `first` on.
pub(super) fn with_rows(x: &HostTensor, first: usize, rows: &HostTensor) -> Result<HostTensor> {
    shapes::write_rows(x, first, rows)?;
    let (mut out, rows) = (values(x)?, values(rows)?);
    out[first * x.shape().last()..][..rows.len()].copy_from_slice(&rows);
    tensor(x.shape().clone(), x.dtype(), out)
}

pub(super) fn concat_columns(parts: &[&HostTensor]) -> Result<HostTensor> {
    let shape = shapes::concat_columns(parts)?;
    let columns: Vec<_> = parts.iter().map(|part| values(part)).collect::<Result<_>>()?;
    let mut out = Vec::with_capacity(shape.numel());
    for row in 0..shape.rows() {
        for (part, values) in parts.iter().zip(&columns) {
            let width = part.shape().last();
            out.extend_from_slice(&values[row * width..][..width]);
        }
    }
    tensor(shape, parts[0].dtype(), out)
}

pub(super) fn space_to_depth(x: &HostTensor) -> Result<HostTensor> {
    let shape = shapes::space_to_depth(x)?;
    let (deep, source) = (size(&shape), size(x.shape()));
    let x_values = values(x)?;
    let mut out = vec![0.0; shape.numel()];
    for (to, from) in patch_indices(deep, source) {
        out[to] = x_values[from];
    }
    tensor(shape, x.dtype(), out)
}

pub(super) fn depth_to_space(x: &HostTensor) -> Result<HostTensor> {
    let shape = shapes::depth_to_space(x)?;
    let (deep, wide) = (size(x.shape()), size(&shape));
    let x_values = values(x)?;
    let mut out = vec![0.0; shape.numel()];
    for (from, to) in patch_indices(deep, wide) {
        out[to] = x_values[from];
    }
    tensor(shape, x.dtype(), out)
}

fn size(shape: &kiln_tensor::Shape) -> [usize; 3] {
    [shape.dims()[0], shape.dims()[1], shape.dims()[2]]
}

/// Pairs of indices of the same element in `[h, w, 4c]` and in `[2h, 2w, c]`.
fn patch_indices(
    [height, width, deep]: [usize; 3],
    [_, wide, channels]: [usize; 3],
) -> impl Iterator<Item = (usize, usize)> {
    (0..height * width * deep).map(move |i| {
        let (pixel, channel) = (i / deep, i % deep);
        let (y, x) = (pixel / width, pixel % width);
        let (c, dy, dx) = (channel / 4, channel / 2 % 2, channel % 2);
        (i, ((2 * y + dy) * wide + 2 * x + dx) * channels + c)
    })
}

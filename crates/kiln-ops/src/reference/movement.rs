use std::ops::Range;

use kiln_tensor::{DType, HostTensor, Shape};

use super::values::{tensor, values};
use crate::{Result, shapes};

pub(super) fn upload(host: &HostTensor, dtype: DType) -> Result<HostTensor> {
    shapes::upload(host, dtype)?;
    Ok(host.to_dtype(dtype)?)
}

pub(super) fn download(x: &HostTensor) -> Result<HostTensor> {
    Ok(x.clone())
}

pub(super) fn download_bytes(x: &HostTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
    let byte = |&v: &f32| ((v * scale + shift).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
    Ok(x.to_f32()?.iter().map(byte).collect())
}

pub(super) fn reshape(x: &HostTensor, shape: Shape) -> Result<HostTensor> {
    Ok(x.reshape(shapes::reshape(x, &shape)?)?)
}

pub(super) fn cast(x: &HostTensor, dtype: DType) -> Result<HostTensor> {
    shapes::cast(x, dtype)?;
    Ok(x.to_dtype(dtype)?)
}

pub(super) fn slice_rows(x: &HostTensor, range: Range<usize>) -> Result<HostTensor> {
    shapes::slice_rows(x, &range)?;
    Ok(x.rows(range)?)
}

pub(super) fn concat_rows(parts: &[&HostTensor]) -> Result<HostTensor> {
    let shape = shapes::concat_rows(parts)?;
    let mut out = Vec::with_capacity(shape.numel());
    for part in parts {
        out.extend(values(part)?);
    }
    tensor(shape, parts[0].dtype(), out)
}

pub(super) fn write_rows(x: &mut HostTensor, first: usize, rows: &HostTensor) -> Result<()> {
    shapes::write_rows(x, first, rows)?;
    let (mut out, rows) = (values(x)?, values(rows)?);
    out[first * x.shape().last()..][..rows.len()].copy_from_slice(&rows);
    *x = tensor(x.shape().clone(), x.dtype(), out)?;
    Ok(())
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

fn size(shape: &Shape) -> [usize; 3] {
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

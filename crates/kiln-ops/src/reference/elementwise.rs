use kiln_tensor::{DType, HostTensor};

use super::{tensor, values};
use crate::{Activation, Result, shapes};

pub(super) fn apply(f: Activation, x: f64) -> f64 {
    match f {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Relu => x.max(0.0),
        Activation::SoftClamp => 3.0 * (x / 3.0).tanh(),
    }
}

pub(super) fn activation(x: &HostTensor, f: Activation) -> Result<HostTensor> {
    let shape = shapes::activation(x)?;
    tensor(shape, x.dtype(), values(x)?.into_iter().map(|v| apply(f, v)).collect())
}

pub(super) fn swiglu(x: &HostTensor) -> Result<HostTensor> {
    let shape = shapes::swiglu(x)?;
    let (x_values, n) = (values(x)?, shape.last());
    let mut out = Vec::with_capacity(shape.numel());
    for row in x_values.chunks((2 * n).max(1)) {
        let (gate, up) = row.split_at(n);
        out.extend(gate.iter().zip(up).map(|(&gate, up)| apply(Activation::Silu, gate) * up));
    }
    tensor(shape, x.dtype(), out)
}

pub(super) fn relative_l1(x: &HostTensor, y: &HostTensor) -> Result<HostTensor> {
    let shape = shapes::relative_l1(x, y)?;
    let (x, y) = (values(x)?, values(y)?);
    let difference: f64 = x.iter().zip(&y).map(|(x, y)| (x - y).abs()).sum();
    let size: f64 = y.iter().map(|y| y.abs()).sum();
    tensor(shape, DType::F32, vec![if difference == 0.0 { 0.0 } else { difference / size }])
}

/// Applies `f` to pairs of elements; the caller has checked the shapes.
pub(super) fn zip(x: &HostTensor, y: &HostTensor, f: impl Fn(f64, f64) -> f64) -> Result<HostTensor> {
    let out = values(x)?.into_iter().zip(values(y)?).map(|(x, y)| f(x, y)).collect();
    tensor(x.shape(), x.dtype(), out)
}

pub(super) fn blend_rows(x: &HostTensor, y: &HostTensor, mask: &HostTensor) -> Result<HostTensor> {
    let shape = shapes::blend_rows(x, y, mask)?;
    let mask = values(mask)?;
    let dim = shape.last();
    let pairs = values(x)?.into_iter().zip(values(y)?).enumerate();
    let out = pairs.map(|(i, (x, y))| (1.0 - mask[i / dim]) * x + mask[i / dim] * y).collect();
    tensor(shape, x.dtype(), out)
}

pub(super) fn affine(x: &HostTensor, scale: &HostTensor, shift: &HostTensor) -> Result<HostTensor> {
    let shape = shapes::affine(x, scale, shift)?;
    let (scale, shift, dim) = (values(scale)?, values(shift)?, shape.last());
    let out = values(x)?.into_iter().enumerate().map(|(i, x)| x * scale[i % dim] + shift[i % dim]).collect();
    tensor(shape, x.dtype(), out)
}

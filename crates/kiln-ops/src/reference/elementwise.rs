use kiln_tensor::{DType, HostTensor};

use super::values::{tensor, values};
use crate::{Activation, Result, shapes};

pub(super) fn apply(f: Activation, x: f64) -> f64 {
    match f {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Relu => x.max(0.0),
        Activation::SoftClamp => 3.0 * (x / 3.0).tanh(),
        Activation::Gelu => 0.5 * x * erfc(-x / std::f64::consts::SQRT_2),
    }
}

/// The complementary error function `1 - 2/√π · ∫₀ˣ exp(-t²) dt`: the integral's Maclaurin series, or for large `x`, where
/// that cancels, the continued fraction of the tail.
fn erfc(x: f64) -> f64 {
    if x.abs() < 2.5 {
        let (mut power, mut sum) = (x, x);
        for n in 1..60 {
            power *= -x * x / f64::from(n);
            sum += power / f64::from(2 * n + 1);
        }
        return 1.0 - std::f64::consts::FRAC_2_SQRT_PI * sum;
    }
    let z = x.abs();
    let fraction = (1..=100).rev().fold(z, |fraction, n| z + 0.5 * f64::from(n) / fraction);
    let tail = (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt());
    if x > 0.0 { tail } else { 2.0 - tail }
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

pub(super) fn add(x: &HostTensor, y: &HostTensor) -> Result<HostTensor> {
    shapes::add(x, y)?;
    zip(x, y, |x, y| x + y)
}

pub(super) fn add_scaled(x: &HostTensor, y: &HostTensor, s: f32) -> Result<HostTensor> {
    shapes::add_scaled(x, y)?;
    zip(x, y, |x, y| x + f64::from(s) * y)
}

pub(super) fn lerp(x: &HostTensor, y: &HostTensor, t: f32) -> Result<HostTensor> {
    shapes::lerp(x, y)?;
    zip(x, y, |x, y| f64::from(t) * y + (1.0 - f64::from(t)) * x)
}

pub(super) fn guide(c: &HostTensor, u: &HostTensor, g: f32) -> Result<HostTensor> {
    shapes::guide(c, u)?;
    zip(c, u, |c, u| u + f64::from(g) * (c - u))
}

/// Applies `f` to pairs of elements; the caller has checked the shapes.
fn zip(x: &HostTensor, y: &HostTensor, f: impl Fn(f64, f64) -> f64) -> Result<HostTensor> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erfc_has_its_tabulated_values() {
        for (x, expected) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 0.004_677_734_981_047_266),
            (2.5, 4.069_520_174_449_589e-4),
            (3.0, 2.209_049_699_858_544e-5),
            (6.0, 2.151_973_671_249_891_3e-17),
            (-1.0, 1.842_700_792_949_715),
            (-3.0, 1.999_977_909_503_001_4),
        ] {
            let found = erfc(x);
            assert!((found - expected).abs() <= 1e-10 * expected, "erfc({x}) = {found}, expected {expected}");
        }
        assert_eq!((erfc(1e30), erfc(-1e30)), (0.0, 2.0));
    }
}

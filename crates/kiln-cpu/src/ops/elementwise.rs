//! Elementwise operations: sums, interpolation, activations and per-column affine maps.

use kiln_ops::{Activation, Result, shapes};
use kiln_tensor::Shape;

use crate::Context;
use crate::element::{Element, read, write};
use crate::math::silu;
use crate::simd::{Simd, dispatch};
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// Elements of a task.
const ELEMENTS_PER_TASK: usize = 1 << 14;

/// A function of two vectors. A type and not a closure, so that it is always inlined.
trait BinaryOp: Copy + Sync {
    fn apply<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V;
}

#[inline(always)]
fn zip_kernel<S: Simd, F: BinaryOp, T: Element>(s: S, f: F, x: &[T], y: &[T], out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        write(s, out, i, f.apply(s, read(s, x, i), read(s, y, i)));
    }
}

dispatch! {
    fn zip_slices<F: BinaryOp, T: Element>(f: F, x: &[T], y: &[T], out: &mut [T]) => zip_kernel;
}

fn zip(cx: &Context, f: impl BinaryOp, x: &CpuTensor, y: &CpuTensor, shape: Shape) -> Result<CpuTensor> {
    by_dtype!(x, T => {
        let (x, y) = (T::elements(x), T::elements(y));
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.pool.for_each_chunk(&mut out, ELEMENTS_PER_TASK, |i, out| {
            let range = i * ELEMENTS_PER_TASK..i * ELEMENTS_PER_TASK + out.len();
            zip_slices(cx.level, f, &x[range.clone()], &y[range], out);
        });
        Ok(T::into_tensor(out, shape))
    })
}

/// `x + s · y`.
#[derive(Clone, Copy)]
struct AddScaled(f32);

impl BinaryOp for AddScaled {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.fma(s.splat(self.0), y, x)
    }
}

/// `x + y`.
#[derive(Clone, Copy)]
struct Add;

impl BinaryOp for Add {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.add(x, y)
    }
}

/// `t · y + (1 - t) · x`.
#[derive(Clone, Copy)]
struct Lerp(f32);

impl BinaryOp for Lerp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.fma(s.splat(self.0), y, s.mul(s.splat(1.0 - self.0), x))
    }
}

/// `u + g · (c - u)` as `g · c + (1 - g) · u`, which is exact where `g` is 1, however large `u` is.
#[derive(Clone, Copy)]
struct Guide(f32);

impl BinaryOp for Guide {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, c: S::V, u: S::V) -> S::V {
        s.fma(s.splat(self.0), c, s.mul(s.splat(1.0 - self.0), u))
    }
}

/// `silu(x) · y`.
#[derive(Clone, Copy)]
struct GatedSilu;

impl BinaryOp for GatedSilu {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.mul(silu(s, x), y)
    }
}

pub(crate) fn add(cx: &Context, x: &CpuTensor, y: &CpuTensor) -> Result<CpuTensor> {
    zip(cx, Add, x, y, shapes::add(x, y)?)
}

pub(crate) fn add_scaled(cx: &Context, x: &CpuTensor, y: &CpuTensor, s: f32) -> Result<CpuTensor> {
    zip(cx, AddScaled(s), x, y, shapes::add_scaled(x, y)?)
}

pub(crate) fn lerp(cx: &Context, x: &CpuTensor, y: &CpuTensor, t: f32) -> Result<CpuTensor> {
    zip(cx, Lerp(t), x, y, shapes::lerp(x, y)?)
}

pub(crate) fn guide(cx: &Context, c: &CpuTensor, u: &CpuTensor, g: f32) -> Result<CpuTensor> {
    zip(cx, Guide(g), c, u, shapes::guide(c, u)?)
}

pub(crate) fn swiglu(cx: &Context, x: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::swiglu(x)?;
    let width = shape.last();
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row(&mut out, width, |row, out| {
            let (gate, up) = x[2 * row * width..][..2 * width].split_at(width);
            zip_slices(cx.level, GatedSilu, gate, up, out);
        });
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn blend_rows(cx: &Context, x: &CpuTensor, y: &CpuTensor, mask: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::blend_rows(x, y, mask)?;
    let (width, mask) = (shape.last(), f32::elements(mask));
    by_dtype!(x, T => {
        let (x, y) = (T::elements(x), T::elements(y));
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row(&mut out, width, |row, out| {
            let range = row * width..(row + 1) * width;
            zip_slices(cx.level, Lerp(mask[row]), &x[range.clone()], &y[range], out);
        });
        Ok(T::into_tensor(out, shape))
    })
}

/// Applies an activation to a vector.
#[inline(always)]
pub(crate) fn activate<S: Simd>(s: S, f: Option<Activation>, x: S::V) -> S::V {
    match f {
        None => x,
        Some(Activation::Silu) => silu(s, x),
        Some(Activation::Relu) => s.max(s.splat(0.0), x),
        Some(Activation::SoftClamp) => lanewise(s, x, soft_clamp),
        Some(Activation::Gelu) => lanewise(s, x, gelu),
    }
}

/// Applies a scalar function lane by lane, for what is rarely used.
#[inline(always)]
fn lanewise<S: Simd>(s: S, x: S::V, f: impl Fn(f32) -> f32) -> S::V {
    let mut lanes = [0.0f32; crate::simd::MAX_LANES];
    write(s, &mut lanes, 0, x);
    lanes[..S::LANES].iter_mut().for_each(|x| *x = f(*x));
    read(s, &lanes, 0)
}

/// `x · Φ(x)`. It is only applied to the tokens of an image that a language model sees, once per image.
fn gelu(x: f32) -> f32 {
    let z = f64::from(x) * std::f64::consts::FRAC_1_SQRT_2;
    (0.5 * f64::from(x) * erfc(-z)) as f32
}

/// The complementary error function: a series of positive terms, so that none cancel, or the continued fraction of the
/// tail, which converges fast where it is used.
fn erfc(x: f64) -> f64 {
    let (z, square) = (x.abs(), x * x);
    let half = if z < 2.0 {
        let (mut term, mut sum) = (z, z);
        for n in 1..32 {
            term *= 2.0 * square / f64::from(2 * n + 1);
            sum += term;
        }
        1.0 - std::f64::consts::FRAC_2_SQRT_PI * (-square).exp() * sum
    } else {
        let fraction = (1..=40).rev().fold(z, |fraction, n| z + 0.5 * f64::from(n) / fraction);
        (-square).exp() / (fraction * std::f64::consts::PI.sqrt())
    };
    if x < 0.0 { 2.0 - half } else { half }
}

/// `3 · tanh(x / 3)`. It is only applied to latents, which are few. In f64, because the C libraries' functions in f32 differ by
/// platform.
fn soft_clamp(x: f32) -> f32 {
    (3.0 * (f64::from(x) / 3.0).tanh()) as f32
}

#[inline(always)]
fn activation_kernel<S: Simd, T: Element>(s: S, f: Activation, x: &[T], out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        write(s, out, i, activate(s, Some(f), read(s, x, i)));
    }
}

dispatch! {
    fn activation_slice<T: Element>(f: Activation, x: &[T], out: &mut [T]) => activation_kernel;
}

pub(crate) fn activation(cx: &Context, x: &CpuTensor, f: Activation) -> Result<CpuTensor> {
    let shape = shapes::activation(x)?;
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.pool.for_each_chunk(&mut out, ELEMENTS_PER_TASK, |i, out| {
            activation_slice(cx.level, f, &x[i * ELEMENTS_PER_TASK..][..out.len()], out);
        });
        Ok(T::into_tensor(out, shape))
    })
}

/// `f((x - mean) · scale + shift)` column by column, with a mean of 0 if there is none.
#[inline(always)]
pub(crate) fn affine_kernel<S: Simd, T: Element>(s: S, columns: &ColumnAffine<'_>, x: &[T], out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        let mut v = read(s, x, i);
        if let Some(mean) = columns.mean {
            v = s.sub(v, read(s, mean, i));
        }
        v = s.fma(v, read(s, columns.scale, i), read(s, columns.shift, i));
        write(s, out, i, activate(s, columns.f, v));
    }
}

/// The parameters of [`affine_kernel`], one value per column.
pub(crate) struct ColumnAffine<'a> {
    pub mean: Option<&'a [f32]>,
    pub scale: &'a [f32],
    pub shift: &'a [f32],
    pub f: Option<Activation>,
}

dispatch! {
    fn affine_row<T: Element>(columns: &ColumnAffine<'_>, x: &[T], out: &mut [T]) => affine_kernel;
}

/// Applies the column parameters to every row.
pub(crate) fn affine_rows<T: TensorElement>(
    cx: &Context,
    columns: &ColumnAffine<'_>,
    x: &[T],
    shape: Shape,
) -> Result<CpuTensor> {
    let width = shape.last();
    let mut out = cx.buffer::<T>(shape.numel())?;
    cx.for_each_row(&mut out, width, |row, out| {
        affine_row(cx.level, columns, &x[row * width..][..width], out)
    });
    Ok(T::into_tensor(out, shape))
}

pub(crate) fn affine(cx: &Context, x: &CpuTensor, scale: &CpuTensor, shift: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::affine(x, scale, shift)?;
    let columns =
        ColumnAffine { mean: None, scale: f32::elements(scale), shift: f32::elements(shift), f: None };
    by_dtype!(x, T => affine_rows(cx, &columns, T::elements(x), shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_clamp_is_rounded_once_on_every_platform() {
        for i in -40_000..=40_000 {
            let x = i as f32 * 2.5e-4;
            let exact = 3.0 * (f64::from(x) / 3.0).tanh();
            assert_eq!(soft_clamp(x), exact as f32, "{x}");
        }
    }
}

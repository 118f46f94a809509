use kiln_ops::{Activation, Result, shapes};
use kiln_tensor::Shape;

use crate::Context;
use crate::element::{Element, read, write};
use crate::math::silu;
use crate::simd::{Simd, dispatch};
use crate::tensor::{CpuTensor, Stored, by_dtype};

/// Elements a thread works on at a time.
const PIECE: usize = 1 << 14;

/// A function of two numbers, for vectors; a type and not a closure, so that it is always inlined.
trait Binary: Copy + Sync {
    fn of<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V;
}

#[inline(always)]
fn zip_kernel<S: Simd, F: Binary, T: Element>(s: S, f: F, x: &[T], y: &[T], out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        write(s, out, i, f.of(s, read(s, x, i), read(s, y, i)));
    }
}

dispatch! {
    fn zip_on<F: Binary, T: Element>(f: F, x: &[T], y: &[T], out: &mut [T]) => zip_kernel;
}

fn zip(cx: &Context, f: impl Binary, x: &CpuTensor, y: &CpuTensor, shape: Shape) -> Result<CpuTensor> {
    by_dtype!(x, T => {
        let (x, y) = (T::of(x), T::of(y));
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.pool.pieces(&mut out, PIECE, |i, out| {
            let at = i * PIECE..i * PIECE + out.len();
            zip_on(cx.level, f, &x[at.clone()], &y[at], out);
        });
        Ok(T::wrap(out, shape))
    })
}

/// `x + s · y`.
#[derive(Clone, Copy)]
struct AddScaled(f32);

impl Binary for AddScaled {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.fma(s.splat(self.0), y, x)
    }
}

/// `x + y`.
#[derive(Clone, Copy)]
struct Add;

impl Binary for Add {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.add(x, y)
    }
}

/// `t · y + (1 - t) · x`.
#[derive(Clone, Copy)]
struct Lerp(f32);

impl Binary for Lerp {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.fma(s.splat(self.0), y, s.mul(s.splat(1.0 - self.0), x))
    }
}

/// `u + g · (c - u)` as `g · c + (1 - g) · u`, which is exact where `g` is 1, however large `u` is.
#[derive(Clone, Copy)]
struct Guide(f32);

impl Binary for Guide {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, c: S::V, u: S::V) -> S::V {
        s.fma(s.splat(self.0), c, s.mul(s.splat(1.0 - self.0), u))
    }
}

/// `silu(x) · y`.
#[derive(Clone, Copy)]
struct GatedSilu;

impl Binary for GatedSilu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
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
        let x = T::of(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.rows(&mut out, width, |row, out| {
            let (gate, up) = x[2 * row * width..][..2 * width].split_at(width);
            zip_on(cx.level, GatedSilu, gate, up, out);
        });
        Ok(T::wrap(out, shape))
    })
}

pub(crate) fn blend_rows(cx: &Context, x: &CpuTensor, y: &CpuTensor, mask: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::blend_rows(x, y, mask)?;
    let (width, mask) = (shape.last(), f32::of(mask));
    by_dtype!(x, T => {
        let (x, y) = (T::of(x), T::of(y));
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.rows(&mut out, width, |row, out| {
            let at = row * width..(row + 1) * width;
            zip_on(cx.level, Lerp(mask[row]), &x[at.clone()], &y[at], out);
        });
        Ok(T::wrap(out, shape))
    })
}

/// An activation of a vector.
#[inline(always)]
pub(crate) fn activate<S: Simd>(s: S, f: Option<Activation>, x: S::V) -> S::V {
    match f {
        None => x,
        Some(Activation::Silu) => silu(s, x),
        Some(Activation::Relu) => s.max(s.splat(0.0), x),
        Some(Activation::SoftClamp) => soft_clamp(s, x),
    }
}

/// `3 · tanh(x / 3)`, lane by lane: it is only taken of latents, which are small.
#[inline(always)]
fn soft_clamp<S: Simd>(s: S, x: S::V) -> S::V {
    let mut lanes = [0.0f32; crate::simd::MAX_LANES];
    write(s, &mut lanes, 0, x);
    for x in &mut lanes[..S::LANES] {
        *x = 3.0 * (*x / 3.0).tanh();
    }
    read(s, &lanes, 0)
}

#[inline(always)]
fn activation_kernel<S: Simd, T: Element>(s: S, f: Activation, x: &[T], out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        write(s, out, i, activate(s, Some(f), read(s, x, i)));
    }
}

dispatch! {
    fn activation_on<T: Element>(f: Activation, x: &[T], out: &mut [T]) => activation_kernel;
}

pub(crate) fn activation(cx: &Context, x: &CpuTensor, f: Activation) -> Result<CpuTensor> {
    let shape = shapes::activation(x)?;
    by_dtype!(x, T => {
        let x = T::of(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.pool.pieces(&mut out, PIECE, |i, out| {
            activation_on(cx.level, f, &x[i * PIECE..][..out.len()], out);
        });
        Ok(T::wrap(out, shape))
    })
}

/// `f((x - mean) · scale + shift)` column by column; a mean that is not there is 0.
#[inline(always)]
pub(crate) fn affine_kernel<S: Simd, T: Element>(s: S, columns: &Affine<'_>, x: &[T], out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        let mut v = read(s, x, i);
        if let Some(mean) = columns.mean {
            v = s.sub(v, read(s, mean, i));
        }
        v = s.fma(v, read(s, columns.scale, i), read(s, columns.shift, i));
        write(s, out, i, activate(s, columns.f, v));
    }
}

/// What [`affine_kernel`] does to each column.
pub(crate) struct Affine<'a> {
    pub mean: Option<&'a [f32]>,
    pub scale: &'a [f32],
    pub shift: &'a [f32],
    pub f: Option<Activation>,
}

dispatch! {
    fn affine_on<T: Element>(columns: &Affine<'_>, x: &[T], out: &mut [T]) => affine_kernel;
}

/// Applies `columns` to every row.
pub(crate) fn affine_rows<T: Stored>(
    cx: &Context,
    columns: &Affine<'_>,
    x: &[T],
    shape: Shape,
) -> Result<CpuTensor> {
    let width = shape.last();
    let mut out = cx.buffer::<T>(shape.numel())?;
    cx.rows(&mut out, width, |row, out| affine_on(cx.level, columns, &x[row * width..][..width], out));
    Ok(T::wrap(out, shape))
}

pub(crate) fn affine(cx: &Context, x: &CpuTensor, scale: &CpuTensor, shift: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::affine(x, scale, shift)?;
    let columns = Affine { mean: None, scale: f32::of(scale), shift: f32::of(shift), f: None };
    by_dtype!(x, T => affine_rows(cx, &columns, T::of(x), shape))
}

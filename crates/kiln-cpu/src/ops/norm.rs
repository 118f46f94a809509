use kiln_ops::{Groups, Result, RopePairs, RopeTable, Tensor, shapes};

use crate::element::{Element, convert, read, write};
use crate::simd::{Simd, dispatch, sum};
use crate::tensor::{CpuTensor, Stored, by_dtype};
use crate::{Context, CpuBackend};

/// The sum of a row.
#[inline(always)]
fn total<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sums = s.splat(0.0);
    for i in (0..x.len()).step_by(S::LANES) {
        sums = s.add(sums, read(s, x, i));
    }
    sum(s, sums)
}

/// The sum of squares of a row.
#[inline(always)]
fn squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sums = s.splat(0.0);
    for i in (0..x.len()).step_by(S::LANES) {
        let v = read(s, x, i);
        sums = s.fma(v, v, sums);
    }
    sum(s, sums)
}

/// Takes the mean off a row.
///
/// The mean of large numbers is itself rounded; what is left of it after subtracting is taken off a second time, so
/// that rows whose mean is far larger than their spread come out right.
#[inline(always)]
fn center<S: Simd>(s: S, x: &mut [f32]) {
    for _ in 0..2 {
        let mean = s.splat(total(s, x) / x.len() as f32);
        for i in (0..x.len()).step_by(S::LANES) {
            let v = s.sub(read(s, x, i), mean);
            write(s, x, i, v);
        }
    }
}

/// One row of `ada_layer_norm`; `wide` is scratch of the row's length.
#[inline(always)]
fn layer_norm_kernel<S: Simd, T: Element>(
    s: S,
    x: &[T],
    by: [&[f32]; 2],
    eps: f32,
    wide: &mut [f32],
    out: &mut [T],
) {
    convert(s, x, wide);
    center(s, wide);
    let spread = s.splat(1.0 / (squares(s, wide) / wide.len() as f32 + eps).sqrt());
    let [scale, shift] = by;
    for i in (0..out.len()).step_by(S::LANES) {
        let scale = s.add(s.splat(1.0), read(s, scale, i));
        let v = s.mul(read(s, wide, i), spread);
        write(s, out, i, s.fma(v, scale, read(s, shift, i)));
    }
}

dispatch! {
    fn layer_norm_on<T: Element>(
        x: &[T], by: [&[f32]; 2], eps: f32, wide: &mut [f32], out: &mut [T],
    ) => layer_norm_kernel;
}

pub(crate) fn ada_layer_norm(
    cx: &Context,
    x: &CpuTensor,
    [scale, shift]: [&CpuTensor; 2],
    groups: &Groups,
    eps: f32,
) -> Result<CpuTensor> {
    let shape = shapes::ada_layer_norm(x, scale, shift, groups)?;
    let (width, scale, shift) = (shape.last(), f32::of(scale), f32::of(shift));
    by_dtype!(x, T => {
        let x = T::of(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.rows_with(&mut out, width, || cx.buffer(width), |row, out, wide| {
            let at = groups.of_row(row) * width;
            let by = [&scale[at..][..width], &shift[at..][..width]];
            layer_norm_on(cx.level, &x[row * width..][..width], by, eps, wide, out);
        })?;
        Ok(T::wrap(out, shape))
    })
}

#[inline(always)]
fn rms_norm_kernel<S: Simd, T: Element>(
    s: S,
    x: &[T],
    weight: &[f32],
    eps: f32,
    wide: &mut [f32],
    out: &mut [T],
) {
    convert(s, x, wide);
    let factor = s.splat(1.0 / (squares(s, wide) / wide.len() as f32 + eps).sqrt());
    for i in (0..out.len()).step_by(S::LANES) {
        write(s, out, i, s.mul(s.mul(read(s, wide, i), factor), read(s, weight, i)));
    }
}

dispatch! {
    fn rms_norm_on<T: Element>(
        x: &[T], weight: &[f32], eps: f32, wide: &mut [f32], out: &mut [T],
    ) => rms_norm_kernel;
}

pub(crate) fn rms_norm(cx: &Context, x: &CpuTensor, weight: &CpuTensor, eps: f32) -> Result<CpuTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let (width, weight) = (shape.last(), f32::of(weight));
    by_dtype!(x, T => {
        let x = T::of(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.rows_with(&mut out, width, || cx.buffer(width), |row, out, wide| {
            rms_norm_on(cx.level, &x[row * width..][..width], weight, eps, wide, out);
        })?;
        Ok(T::wrap(out, shape))
    })
}

/// What turns one token's heads: `x · cos + partner · sin`, element by element, signs in `sin`.
#[derive(Clone, Copy)]
struct Turn<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    pairs: RopePairs,
}

/// Lays out the cosines and sines of a token's pairs as [`Turn`] has them.
fn spread_angles([cos, sin]: [&[f32]; 2], pairs: RopePairs, [cosines, sines]: [&mut [f32]; 2]) {
    let half = cos.len();
    for (i, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
        let [first, second] = match pairs {
            RopePairs::Adjacent => [2 * i, 2 * i + 1],
            RopePairs::Halves => [i, half + i],
        };
        (cosines[first], cosines[second]) = (cos, cos);
        (sines[first], sines[second]) = (-sin, sin);
    }
}

/// All heads of one token; `wide` is scratch of a head's width.
#[inline(always)]
fn norm_rope_kernel<S: Simd, T: Element>(
    s: S,
    x: &[T],
    weight: &[f32],
    turn: Turn<'_>,
    eps: f32,
    wide: &mut [f32],
    out: &mut [T],
) {
    let dim = weight.len();
    let (cos, sin) = (&turn.cos[..dim], &turn.sin[..dim]);
    for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
        convert(s, x, wide);
        let factor = s.splat(1.0 / (squares(s, wide) / dim as f32 + eps).sqrt());
        match turn.pairs {
            RopePairs::Adjacent => {
                for i in (0..dim).step_by(S::LANES) {
                    let v = s.mul(s.mul(read(s, wide, i), factor), read(s, weight, i));
                    let turned = s.fma(v, read(s, cos, i), s.mul(s.swap(v), read(s, sin, i)));
                    write(s, out, i, turned);
                }
            }
            RopePairs::Halves => {
                for i in (0..dim).step_by(S::LANES) {
                    let v = s.mul(s.mul(read(s, wide, i), factor), read(s, weight, i));
                    write(s, wide, i, v);
                }
                let half = dim / 2;
                let (a, b) = wide.split_at(half);
                let (first, second) = out.split_at_mut(half);
                for (x, partner, out, at) in [(a, b, first, 0), (b, a, second, half)] {
                    for i in (0..half).step_by(S::LANES) {
                        let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
                        let turned = s.mul(read(s, partner, i), read(s, sin, i));
                        write(s, out, i, s.fma(read(s, x, i), read(s, cos, i), turned));
                    }
                }
            }
        }
    }
}

dispatch! {
    fn norm_rope_on<T: Element>(
        x: &[T], weight: &[f32], turn: Turn<'_>, eps: f32, wide: &mut [f32], out: &mut [T],
    ) => norm_rope_kernel;
}

pub(crate) fn norm_rope(
    cx: &Context,
    x: &CpuTensor,
    weight: &CpuTensor,
    rope: &RopeTable<CpuBackend>,
    eps: f32,
) -> Result<CpuTensor> {
    let [_, heads, dim] = shapes::norm_rope(x, weight, rope)?;
    let (weight, cos, sin) = (f32::of(weight), f32::of(&rope.cos), f32::of(&rope.sin));
    let width = heads * dim;
    by_dtype!(x, T => {
        let values = T::of(x);
        let mut out = cx.buffer::<T>(values.len())?;
        cx.rows_with(&mut out, width, || cx.buffer(3 * dim), |token, out, scratch| {
            let at = token * dim / 2..(token + 1) * dim / 2;
            let (wide, angles) = scratch.split_at_mut(dim);
            let (cosines, sines) = angles.split_at_mut(dim);
            spread_angles([&cos[at.clone()], &sin[at]], rope.pairs, [cosines, sines]);
            let turn = Turn { cos: cosines, sin: sines, pairs: rope.pairs };
            norm_rope_on(cx.level, &values[token * width..][..width], weight, turn, eps, wide, out);
        })?;
        Ok(T::wrap(out, x.shape().clone()))
    })
}

//! Layer norm, RMS norm, and the fused RMS norm with rotary embedding of queries and keys.

use kiln_ops::{Result, RopeLayout, RopeTable, RowGroups, Tensor, shapes};

use crate::Context;
use crate::element::{Element, convert, read, write};
use crate::simd::{MAX_LANES, Simd, Sum, dispatch};
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// The sum of a row.
#[inline(always)]
fn sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sum = Sum::zero(s);
    let blocks = x.chunks_exact(MAX_LANES);
    let rest = blocks.remainder();
    for block in blocks {
        add_block(s, block, &mut sum);
    }
    add_block(s, rest, &mut sum);
    sum.total(s)
}

/// Adds up to [`MAX_LANES`] values.
#[inline(always)]
fn add_block<S: Simd>(s: S, block: &[f32], sum: &mut Sum<S>) {
    for part in 0..Sum::<S>::PARTS {
        if part * S::LANES < block.len() {
            sum.add(s, part, read(s, block, part * S::LANES));
        }
    }
}

/// The sum of squares of a row.
#[inline(always)]
fn sum_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sum = Sum::zero(s);
    let blocks = x.chunks_exact(MAX_LANES);
    let rest = blocks.remainder();
    for block in blocks {
        add_squares(s, block, &mut sum);
    }
    add_squares(s, rest, &mut sum);
    sum.total(s)
}

/// Adds the squares of up to [`MAX_LANES`] values.
#[inline(always)]
fn add_squares<S: Simd>(s: S, block: &[f32], sum: &mut Sum<S>) {
    for part in 0..Sum::<S>::PARTS {
        if part * S::LANES < block.len() {
            let v = read(s, block, part * S::LANES);
            sum.add_product(s, part, v, v);
        }
    }
}

/// Subtracts the mean of a row, twice: the mean of large values is itself rounded, and the second pass removes what is left
/// of it, so that rows whose mean is far larger than their spread come out right.
#[inline(always)]
fn center<S: Simd>(s: S, x: &mut [f32]) {
    for _ in 0..2 {
        let mean = s.splat(sum(s, x) / x.len() as f32);
        for i in (0..x.len()).step_by(S::LANES) {
            let v = s.sub(read(s, x, i), mean);
            write(s, x, i, v);
        }
    }
}

/// One row of `ada_layer_norm`; `modulation` is its scale and shift, `wide` is scratch of the row's length.
#[inline(always)]
fn layer_norm_kernel<S: Simd, T: Element>(
    s: S,
    x: &[T],
    modulation: [&[f32]; 2],
    eps: f32,
    wide: &mut [f32],
    out: &mut [T],
) {
    convert(s, x, wide);
    center(s, wide);
    let inv_std = s.splat(1.0 / (sum_squares(s, wide) / wide.len() as f32 + eps).sqrt());
    let [scale, shift] = modulation;
    for i in (0..out.len()).step_by(S::LANES) {
        let scale = s.add(s.splat(1.0), read(s, scale, i));
        let v = s.mul(read(s, wide, i), inv_std);
        write(s, out, i, s.fma(v, scale, read(s, shift, i)));
    }
}

dispatch! {
    fn layer_norm_row<T: Element>(
        x: &[T], modulation: [&[f32]; 2], eps: f32, wide: &mut [f32], out: &mut [T],
    ) => layer_norm_kernel;
}

pub(crate) fn ada_layer_norm(
    cx: &Context,
    x: &CpuTensor,
    scale: &CpuTensor,
    shift: &CpuTensor,
    groups: &RowGroups,
    eps: f32,
) -> Result<CpuTensor> {
    let shape = shapes::ada_layer_norm(x, scale, shift, groups)?;
    let (width, scale, shift) = (shape.last(), f32::elements(scale), f32::elements(shift));
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row_with(&mut out, width, || cx.buffer(width), |row, out, wide| {
            let at = groups.group_of(row) * width;
            let modulation = [&scale[at..][..width], &shift[at..][..width]];
            layer_norm_row(cx.level, &x[row * width..][..width], modulation, eps, wide, out);
        })?;
        Ok(T::into_tensor(out, shape))
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
    let inv_rms = s.splat(1.0 / (sum_squares(s, wide) / wide.len() as f32 + eps).sqrt());
    for i in (0..out.len()).step_by(S::LANES) {
        write(s, out, i, s.mul(s.mul(read(s, wide, i), inv_rms), read(s, weight, i)));
    }
}

dispatch! {
    fn rms_norm_row<T: Element>(
        x: &[T], weight: &[f32], eps: f32, wide: &mut [f32], out: &mut [T],
    ) => rms_norm_kernel;
}

pub(crate) fn rms_norm(cx: &Context, x: &CpuTensor, weight: &CpuTensor, eps: f32) -> Result<CpuTensor> {
    let shape = shapes::rms_norm(x, weight)?;
    let (width, weight) = (shape.last(), f32::elements(weight));
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row_with(&mut out, width, || cx.buffer(width), |row, out, wide| {
            rms_norm_row(cx.level, &x[row * width..][..width], weight, eps, wide, out);
        })?;
        Ok(T::into_tensor(out, shape))
    })
}

/// The rotation of one token's heads: `x · cos + partner · sin` per element, with the sign in `sin`.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    layout: RopeLayout,
}

/// Expands the cosines and sines of a token's pairs to one value per element, as in [`Rotation`].
fn expand_angles([cos, sin]: [&[f32]; 2], layout: RopeLayout, [cosines, sines]: [&mut [f32]; 2]) {
    let half = cos.len();
    for (i, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
        let [first, second] = match layout {
            RopeLayout::Interleaved => [2 * i, 2 * i + 1],
            RopeLayout::HalfSplit => [i, half + i],
        };
        (cosines[first], cosines[second]) = (cos, cos);
        (sines[first], sines[second]) = (-sin, sin);
    }
}

/// Norm, if there is a weight, and rotation of all heads of one token; `wide` is scratch of a head's width.
#[inline(always)]
fn norm_rope_kernel<S: Simd, T: Element>(
    s: S,
    x: &[T],
    weight: Option<&[f32]>,
    rotation: Rotation<'_>,
    eps: f32,
    wide: &mut [f32],
    out: &mut [T],
) {
    let dim = wide.len();
    let (cos, sin) = (&rotation.cos[..dim], &rotation.sin[..dim]);
    for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
        convert(s, x, wide);
        if let Some(weight) = weight {
            let inv_rms = s.splat(1.0 / (sum_squares(s, wide) / dim as f32 + eps).sqrt());
            for i in (0..dim).step_by(S::LANES) {
                let v = s.mul(s.mul(read(s, wide, i), inv_rms), read(s, &weight[..dim], i));
                write(s, wide, i, v);
            }
        }
        match rotation.layout {
            RopeLayout::Interleaved => {
                for i in (0..dim).step_by(S::LANES) {
                    let v = read(s, wide, i);
                    let rotated = s.fma(v, read(s, cos, i), s.mul(s.swap_pairs(v), read(s, sin, i)));
                    write(s, out, i, rotated);
                }
            }
            RopeLayout::HalfSplit => {
                let half = dim / 2;
                let (a, b) = wide.split_at(half);
                let (first, second) = out.split_at_mut(half);
                for (x, partner, out, at) in [(a, b, first, 0), (b, a, second, half)] {
                    for i in (0..half).step_by(S::LANES) {
                        let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
                        let crossed = s.mul(read(s, partner, i), read(s, sin, i));
                        write(s, out, i, s.fma(read(s, x, i), read(s, cos, i), crossed));
                    }
                }
            }
        }
    }
}

dispatch! {
    fn norm_rope_token<T: Element>(
        x: &[T], weight: Option<&[f32]>, rotation: Rotation<'_>, eps: f32, wide: &mut [f32], out: &mut [T],
    ) => norm_rope_kernel;
}

pub(crate) fn norm_rope(
    cx: &Context,
    x: &CpuTensor,
    weight: Option<&CpuTensor>,
    rope: &RopeTable<CpuTensor>,
    eps: f32,
) -> Result<CpuTensor> {
    let [_, heads, dim] = shapes::norm_rope(x, weight, rope)?;
    let (weight, cos, sin) = (weight.map(f32::elements), f32::elements(&rope.cos), f32::elements(&rope.sin));
    let width = heads * dim;
    by_dtype!(x, T => {
        let values = T::elements(x);
        let mut out = cx.buffer::<T>(values.len())?;
        cx.for_each_row_with(&mut out, width, || cx.buffer(3 * dim), |token, out, scratch| {
            let at = token * dim / 2..(token + 1) * dim / 2;
            let (wide, angles) = scratch.split_at_mut(dim);
            let (cosines, sines) = angles.split_at_mut(dim);
            expand_angles([&cos[at.clone()], &sin[at]], rope.pairs, [cosines, sines]);
            let rotation = Rotation { cos: cosines, sin: sines, layout: rope.pairs };
            norm_rope_token(cx.level, &values[token * width..][..width], weight, rotation, eps, wide, out);
        })?;
        Ok(T::into_tensor(out, x.shape().clone()))
    })
}

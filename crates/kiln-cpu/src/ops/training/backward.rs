//! Gradients of norms and element-wise operations, small products and reductions.
//!
//! A row's sums are f64: they are few, and their error would spread over the whole row.

use kiln_ops::training::{keeps, shapes};
use kiln_ops::{Result, RopeLayout, RopeTable, RowGroups, Tensor as _};
use kiln_tensor::Shape;

use crate::Context;
use crate::element::{Element, Scalar as _, read, write};
use crate::math::exp;
use crate::parallel::DisjointMut;
use crate::simd::{Simd, dispatch};
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// Elements of a chunk that is summed by itself, so that sums don't depend on the number of threads.
const CHUNK: usize = 1 << 13;

#[inline(always)]
fn store_kernel<S: Simd, T: Element>(s: S, values: &[f32], add: Option<&[T]>, out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        let v = read(s, values, i);
        write(s, out, i, if let Some(add) = add { s.add(v, read(s, add, i)) } else { v });
    }
}

dispatch! {
    /// Rounds values, plus `add`, to the result's type.
    fn store_row<T: Element>(values: &[f32], add: Option<&[T]>, out: &mut [T]) => store_kernel;
}

pub(crate) fn ada_layer_norm_backward(
    cx: &Context,
    dy: &CpuTensor,
    x: &CpuTensor,
    scale: &CpuTensor,
    groups: &RowGroups,
    eps: f32,
    add: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let shape = shapes::ada_layer_norm_backward(dy, x, scale, groups, add)?;
    let (width, scale) = (shape.last(), f32::elements(scale));
    by_dtype!(x, T => {
        let (dy, x, add) = (T::elements(dy), T::elements(x), add.map(T::elements));
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row_with(&mut out, width, || cx.buffer::<f32>(2 * width), |row, out, wide| {
            let at = row * width..(row + 1) * width;
            let scale = &scale[groups.group_of(row) * width..][..width];
            let (n, g) = wide.split_at_mut(width);
            let (dy, x) = (&dy[at.clone()], &x[at.clone()]);
            let count = width as f64;
            let mean = x.iter().map(|x| f64::from(x.widen())).sum::<f64>() / count;
            let variance = x.iter().map(|x| (f64::from(x.widen()) - mean).powi(2)).sum::<f64>() / count;
            let r = 1.0 / (variance + f64::from(eps)).sqrt();
            let (mut sum_g, mut sum_gn) = (0.0, 0.0);
            for i in 0..width {
                n[i] = ((f64::from(x[i].widen()) - mean) * r) as f32;
                g[i] = dy[i].widen() * (1.0 + scale[i]);
                sum_g += f64::from(g[i]);
                sum_gn += f64::from(g[i]) * f64::from(n[i]);
            }
            let (mean_g, mean_gn, r) = ((sum_g / count) as f32, (sum_gn / count) as f32, r as f32);
            for (g, n) in g.iter_mut().zip(n.iter()) {
                *g = r * (*g - mean_g - *n * mean_gn);
            }
            store_row(cx.level, g, add.map(|add| &add[at]), out);
        })?;
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn norm_rope_backward(
    cx: &Context,
    dy: &CpuTensor,
    x: &CpuTensor,
    weight: Option<&CpuTensor>,
    rope: &RopeTable<CpuTensor>,
    eps: f32,
) -> Result<CpuTensor> {
    let [_, heads, head_dim] = shapes::norm_rope_backward(dy, x, weight, rope)?;
    let (cos, sin, half) = (f32::elements(&rope.cos), f32::elements(&rope.sin), head_dim / 2);
    let weight = weight.map(f32::elements);
    let shape: Shape = x.shape().clone();
    by_dtype!(x, T => {
        let (dy, x) = (T::elements(dy), T::elements(x));
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row_with(&mut out, head_dim, || cx.buffer::<f32>(head_dim), |row, out, g| {
            let angles = row / heads * half..(row / heads + 1) * half;
            let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
            let (dy, x) = (&dy[row * head_dim..][..head_dim], &x[row * head_dim..][..head_dim]);
            for pair in 0..half {
                let [first, second] = match rope.pairs {
                    RopeLayout::Interleaved => [2 * pair, 2 * pair + 1],
                    RopeLayout::HalfSplit => [pair, half + pair],
                };
                let (a, b) = (dy[first].widen(), dy[second].widen());
                g[first] = a * cos[pair] + b * sin[pair];
                g[second] = b * cos[pair] - a * sin[pair];
            }
            if let Some(weight) = weight {
                let count = head_dim as f64;
                let squares: f64 = x.iter().map(|x| f64::from(x.widen()).powi(2)).sum();
                let r = 1.0 / (squares / count + f64::from(eps)).sqrt();
                let mut sum_gx = 0.0;
                for i in 0..head_dim {
                    g[i] *= weight[i];
                    sum_gx += f64::from(g[i]) * f64::from(x[i].widen());
                }
                let (factor, r) = ((sum_gx / count * r * r) as f32, r as f32);
                g.iter_mut().zip(x).for_each(|(g, x)| *g = r * (*g - x.widen() * factor));
            }
            store_row(cx.level, g, None, out);
        })?;
        Ok(T::into_tensor(out, shape))
    })
}

#[inline(always)]
fn swiglu_kernel<S: Simd, T: Element>(s: S, dy: &[T], x: &[T], out: &mut [T]) {
    let (a, u) = x.split_at(dy.len());
    let (da, du) = out.split_at_mut(dy.len());
    let one = s.splat(1.0);
    for i in (0..dy.len()).step_by(S::LANES) {
        let (dy, a, u) = (read(s, dy, i), read(s, a, i), read(s, u, i));
        let sigmoid = s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), a))));
        let slope = s.mul(sigmoid, s.fma(a, s.sub(one, sigmoid), one));
        write(s, da, i, s.mul(s.mul(dy, u), slope));
        write(s, du, i, s.mul(dy, s.mul(a, sigmoid)));
    }
}

dispatch! {
    fn swiglu_row<T: Element>(dy: &[T], x: &[T], out: &mut [T]) => swiglu_kernel;
}

pub(crate) fn swiglu_backward(cx: &Context, dy: &CpuTensor, x: &CpuTensor) -> Result<CpuTensor> {
    let shape = shapes::swiglu_backward(dy, x)?;
    let width = dy.shape().last();
    by_dtype!(x, T => {
        let (dy, x) = (T::elements(dy), T::elements(x));
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row(&mut out, 2 * width, |row, out| {
            swiglu_row(cx.level, &dy[row * width..][..width], &x[2 * row * width..][..2 * width], out);
        });
        Ok(T::into_tensor(out, shape))
    })
}

#[inline(always)]
fn multiply_kernel<S: Simd, T: Element>(s: S, x: &[T], factor: &[f32], out: &mut [T]) {
    for i in (0..out.len()).step_by(S::LANES) {
        write(s, out, i, s.mul(read(s, x, i), read(s, factor, i)));
    }
}

dispatch! {
    fn multiply_row<T: Element>(x: &[T], factor: &[f32], out: &mut [T]) => multiply_kernel;
}

pub(crate) fn gate_rows(
    cx: &Context,
    x: &CpuTensor,
    gate: &CpuTensor,
    groups: &RowGroups,
) -> Result<CpuTensor> {
    let shape = shapes::gate_rows(x, gate, groups)?;
    let (width, gate) = (shape.last(), f32::elements(gate));
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row(&mut out, width, |row, out| {
            let gate = &gate[groups.group_of(row) * width..][..width];
            multiply_row(cx.level, &x[row * width..][..width], gate, out);
        });
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn dropout(cx: &Context, x: &CpuTensor, rate: f32, seed: u64) -> Result<CpuTensor> {
    let shape = shapes::dropout(x, rate)?;
    let factor = 1.0 / (1.0 - rate);
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.pool.for_each_chunk_with(&mut out, CHUNK, || cx.buffer::<f32>(CHUNK), |chunk, out, kept| {
            let first = chunk * CHUNK;
            for (i, kept) in kept[..out.len()].iter_mut().enumerate() {
                *kept = if keeps(seed, (first + i) as u64, rate) { factor } else { 0.0 };
            }
            multiply_row(cx.level, &x[first..][..out.len()], &kept[..out.len()], out);
        })?;
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn mix_rows(cx: &Context, x: &CpuTensor, a: &CpuTensor, transposed: bool) -> Result<CpuTensor> {
    let (shape, [from, to]) = shapes::mix_rows(x, a, transposed)?;
    let (width, cols, a) = (shape.last(), a.shape().last(), f32::elements(a));
    by_dtype!(x, T => {
        let x = T::elements(x);
        let mut out = cx.buffer::<T>(shape.numel())?;
        cx.for_each_row_with(&mut out, width, || cx.buffer::<f32>(width), |row, out, sums| {
            let (block, i) = (row / to, row % to);
            sums.fill(0.0);
            for (j, x) in x[block * from * width..][..from * width].chunks_exact(width).enumerate() {
                let factor = if transposed { a[j * cols + i] } else { a[i * cols + j] };
                sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor * x.widen());
            }
            store_row(cx.level, sums, None, out);
        })?;
        Ok(T::into_tensor(out, shape))
    })
}

pub(crate) fn mix_rows_gradient(
    cx: &Context,
    dy: &CpuTensor,
    x: &CpuTensor,
    size: [usize; 2],
    scale: f32,
    add: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    let shape = shapes::mix_rows_gradient(dy, x, size, add)?;
    let ([out, cols], width) = (size, dy.shape().last());
    let blocks = dy.shape().rows() / out;
    let add = add.map(f32::elements);
    let mut da = cx.buffer::<f32>(shape.numel())?;
    by_dtype!(dy, T => {
        let (dy, x) = (T::elements(dy), T::elements(x));
        cx.pool.for_each_chunk(&mut da, 1, |element, da| {
            let (i, j) = (element / cols, element % cols);
            let block = |b: usize| {
                let (dy, x) = (&dy[(b * out + i) * width..][..width], &x[(b * cols + j) * width..][..width]);
                dot(dy, x)
            };
            let sum: f64 = (0..blocks).map(block).sum();
            da[0] = (f64::from(scale) * sum) as f32 + add.map_or(0.0, |add| add[element]);
        });
    });
    Ok(f32::into_tensor(da, shape))
}

fn dot<T: Element>(x: &[T], y: &[T]) -> f64 {
    x.iter().zip(y).map(|(x, y)| f64::from(x.widen()) * f64::from(y.widen())).sum()
}

pub(crate) fn column_dot(
    cx: &Context,
    x: &CpuTensor,
    y: &CpuTensor,
    add: Option<&CpuTensor>,
) -> Result<CpuTensor> {
    const COLUMNS: usize = 64;
    let shape = shapes::column_dot(x, y, add)?;
    let width = shape.numel();
    let add = add.map(f32::elements);
    let mut sums = cx.buffer::<f32>(width)?;
    by_dtype!(x, T => {
        let (x, y) = (T::elements(x), T::elements(y));
        cx.pool.for_each_chunk(&mut sums, COLUMNS, |chunk, out| {
            let first = chunk * COLUMNS;
            let mut sums = [0f64; COLUMNS];
            for (x, y) in x.chunks_exact(width.max(1)).zip(y.chunks_exact(width.max(1))) {
                let pairs = x[first..].iter().zip(&y[first..]);
                for (sum, (x, y)) in sums[..out.len()].iter_mut().zip(pairs) {
                    *sum += f64::from(x.widen()) * f64::from(y.widen());
                }
            }
            for (i, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                *out = (sum + add.map_or(0.0, |add| f64::from(add[first + i]))) as f32;
            }
        });
    });
    Ok(f32::into_tensor(sums, shape))
}

pub(crate) fn squared_error(
    cx: &Context,
    x: &CpuTensor,
    y: &CpuTensor,
    scale: f32,
) -> Result<[CpuTensor; 2]> {
    let shape = shapes::squared_error(x, y)?;
    let n = shape.numel();
    let mut sums = vec![0f64; n.div_ceil(CHUNK)];
    let mut loss = cx.buffer::<f32>(1)?;
    by_dtype!(x, T => {
        let (x, y) = (T::elements(x), T::elements(y));
        let mut dx = cx.buffer::<T>(n)?;
        let data = DisjointMut::new(&mut dx);
        cx.pool.for_each_chunk(&mut sums, 1, |chunk, sum| {
            let range = chunk * CHUNK..n.min((chunk + 1) * CHUNK);
            // SAFETY: every chunk has a range of its own.
            let dx = unsafe { data.slice(range.clone()) };
            let mut values = [0f32; CHUNK];
            for (i, (x, y)) in x[range.clone()].iter().zip(&y[range]).enumerate() {
                let difference = x.widen() - y.widen();
                sum[0] += f64::from(difference) * f64::from(difference);
                values[i] = 2.0 * scale * difference;
            }
            let count = dx.len();
            store_row(cx.level, &values[..count], None, dx);
        });
        loss[0] = (f64::from(scale) * sums.iter().sum::<f64>()) as f32;
        Ok([f32::into_tensor(loss, [1, 1].into()), T::into_tensor(dx, shape)])
    })
}

pub(crate) fn sum_squares(cx: &Context, xs: &[&CpuTensor]) -> Result<CpuTensor> {
    shapes::sum_squares(xs)?;
    let mut total = 0.0;
    for x in xs {
        let x = f32::elements(x);
        let mut sums = vec![0f64; x.len().div_ceil(CHUNK)];
        cx.pool.for_each_chunk(&mut sums, 1, |chunk, sum| {
            let end = x.len().min((chunk + 1) * CHUNK);
            sum[0] = x[chunk * CHUNK..end].iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        });
        total += sums.iter().sum::<f64>();
    }
    let mut out = cx.buffer::<f32>(1)?;
    out[0] = total as f32;
    Ok(f32::into_tensor(out, [1, 1].into()))
}

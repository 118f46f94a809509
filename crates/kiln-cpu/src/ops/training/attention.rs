//! Attention with its log-sum-exp, and its gradients.
//!
//! Head by head, a chunk of queries at a time meets all keys: scores, their exponentials and gradients are matrices of
//! [`QUERIES`] rows, made and used up by matrix products. Nothing of the size of all scores is kept.

use std::ops::Range;

use kiln_ops::training::shapes;
use kiln_ops::{AttentionMask, AttentionSpec, Result, Tensor as _};
use kiln_tensor::DType;

use super::matmul::{Columns, Rows, product};
use crate::Context;
use crate::element::{Element, read, write};
#[cfg(target_arch = "x86_64")]
use crate::gemm::DirectOutput;
use crate::gemm::{Epilogue, Orientation, SumBlock};
use crate::math::exp;
use crate::ops::attention::softmax::{SoftmaxState, softmax_step};
use crate::ops::movement;
use crate::parallel::DisjointMut;
use crate::simd::{Simd, dispatch};
use crate::tensor::{CpuTensor, TensorElement, by_dtype};

/// Queries of a chunk.
const QUERIES: usize = 128;

/// `scale · sums`, written to or added to some columns of a matrix.
struct Placed<'a> {
    scale: f32,
    /// The first element.
    start: usize,
    /// Elements from one row to the next.
    stride: usize,
    add: bool,
    data: &'a DisjointMut<'a, f32>,
}

impl Epilogue for Placed<'_> {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, block: SumBlock<'_>) {
        let scale = s.splat(self.scale);
        for row in block.rows.clone() {
            let start = self.start + row * self.stride + block.cols.start;
            // SAFETY: every column of every row is written once, by the task that has its sums.
            let out = unsafe { self.data.slice(start..start + block.cols.len()) };
            let sums = block.row(row, block.cols.clone());
            for i in (0..out.len()).step_by(S::LANES) {
                let sum = s.mul(scale, read(s, sums, i));
                let v = if self.add { s.add(sum, read(s, out, i)) } else { sum };
                write(s, out, i, v);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn direct_output(&self, _: Range<usize>, _: Range<usize>) -> Option<DirectOutput> {
        None
    }
}

/// The keys that a query attends to.
fn visible(mask: &AttentionMask, query: usize, keys: usize) -> Range<usize> {
    match mask {
        AttentionMask::None => 0..keys,
        AttentionMask::Causal { valid } => 0..(query + 1).min(*valid),
        AttentionMask::Isolated { rows } if rows.contains(&query) => rows.clone(),
        AttentionMask::Isolated { .. } => 0..keys,
    }
}

/// Row blocks as one tensor.
fn joined(cx: &Context, blocks: &[&CpuTensor]) -> Result<CpuTensor> {
    match blocks {
        [one] => Ok((*one).clone()),
        _ => movement::concat_rows(cx, blocks),
    }
}

#[inline(always)]
fn scale_kernel<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    let factor = s.splat(factor);
    for i in (0..x.len()).step_by(S::LANES) {
        let v = s.mul(factor, read(s, x, i));
        write(s, x, i, v);
    }
}

dispatch! {
    fn scale_row(x: &mut [f32], factor: f32) => scale_kernel;
}

/// Scores to probabilities, and `dp` to the scores' gradient `p · (dp - delta)`.
#[inline(always)]
fn gradient_kernel<S: Simd>(
    s: S,
    scores: &mut [f32],
    dp: &mut [f32],
    visible: Range<usize>,
    lse: f32,
    delta: f32,
) {
    for x in [&mut *scores, &mut *dp] {
        x[..visible.start].fill(0.0);
        x[visible.end..].fill(0.0);
    }
    let (scores, dp) = (&mut scores[visible.clone()], &mut dp[visible]);
    let (lse, delta) = (s.splat(lse), s.splat(delta));
    for i in (0..scores.len()).step_by(S::LANES) {
        let p = exp(s, s.sub(read(s, scores, i), lse));
        let ds = s.mul(p, s.sub(read(s, dp, i), delta));
        write(s, scores, i, p);
        write(s, dp, i, ds);
    }
}

dispatch! {
    fn gradient_row(
        scores: &mut [f32], dp: &mut [f32], visible: Range<usize>, lse: f32, delta: f32,
    ) => gradient_kernel;
}

pub(crate) fn attention_lse(
    cx: &Context,
    q: &[&CpuTensor],
    k: &[&CpuTensor],
    v: &[&CpuTensor],
    spec: &AttentionSpec,
) -> Result<[CpuTensor; 2]> {
    let size = kiln_ops::shapes::attention(q, k, v, spec)?;
    let (queries, keys, heads, dim) = (size.queries, size.keys, size.heads, size.head_dim);
    let (q_stride, k_stride) = (heads * dim, size.kv_heads * dim);
    let scale = 1.0 / (dim as f32).sqrt();
    let [q, k, v] = [joined(cx, q)?, joined(cx, k)?, joined(cx, v)?];
    let mut out = cx.buffer::<f32>(queries * q_stride)?;
    let mut lse = cx.buffer::<f32>(queries * heads)?;
    let mut scores = cx.buffer::<f32>(QUERIES.min(queries) * keys)?;
    by_dtype!(&q, T => {
        let (q, k, v) = (T::elements(&q), T::elements(&k), T::elements(&v));
        let out_data = DisjointMut::new(&mut out);
        for head in 0..heads {
            let kv_start = head / (heads / size.kv_heads) * dim;
            for first in (0..queries).step_by(QUERIES) {
                let count = QUERIES.min(queries - first);
                let q_start = first * q_stride + head * dim;
                let of_q = Rows { data: q, start: q_start, stride: q_stride };
                let of_k = Rows { data: k, start: kv_start, stride: k_stride };
                let data = DisjointMut::new(&mut scores);
                let to = Placed { scale, start: 0, stride: keys, add: false, data: &data };
                product(cx, &of_q, of_k, Orientation::ColsByDepth, [count, keys, dim], &to)?;
                let totals = &mut lse[first * heads..(first + count) * heads];
                let pairs = DisjointMut::new(totals);
                cx.for_each_row(&mut scores[..count * keys], keys, |i, scores| {
                    let mut state = SoftmaxState::START;
                    softmax_step(cx.level, scores, visible(&spec.mask, first + i, keys), &mut state, &mut []);
                    scale_row(cx.level, scores, 1.0 / state.total);
                    // SAFETY: every query has an element of its own.
                    let lse = unsafe { pairs.slice(i * heads + head..i * heads + head + 1) };
                    // In f64, because the C libraries' functions in f32 differ by platform.
                    lse[0] = state.max + f64::from(state.total).ln() as f32;
                });
                let of_p = Rows { data: &scores[..], start: 0, stride: keys };
                let of_v = Rows { data: v, start: kv_start, stride: k_stride };
                let to = Placed { scale: 1.0, start: q_start, stride: q_stride, add: false, data: &out_data };
                product(cx, &of_p, of_v, Orientation::DepthByCols, [count, dim, keys], &to)?;
            }
        }
    });
    let out = f32::into_tensor(out, size.result());
    let out = movement::cast(cx, &out, q.dtype())?;
    Ok([out, f32::into_tensor(lse, [queries, heads].into())])
}

#[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
pub(crate) fn attention_backward(
    cx: &Context,
    dout: &[&CpuTensor],
    q: &[&CpuTensor],
    k: &[&CpuTensor],
    v: &[&CpuTensor],
    out: &CpuTensor,
    lse: &CpuTensor,
    spec: &AttentionSpec,
) -> Result<[CpuTensor; 3]> {
    let size = shapes::attention_backward(dout, q, k, v, out, lse, spec)?;
    let (queries, keys, heads, dim) = (size.queries, size.keys, size.heads, size.head_dim);
    let (q_stride, k_stride) = (heads * dim, size.kv_heads * dim);
    let scale = 1.0 / (dim as f32).sqrt();
    let [q, k, v, dout] = [joined(cx, q)?, joined(cx, k)?, joined(cx, v)?, joined(cx, dout)?];
    let dtype: DType = q.dtype();
    let lse = f32::elements(lse);
    let mut dq = cx.buffer::<f32>(queries * q_stride)?;
    let mut dk = cx.buffer::<f32>(keys * k_stride)?;
    let mut dv = cx.buffer::<f32>(keys * k_stride)?;
    dk.fill(0.0);
    dv.fill(0.0);
    let mut scores = cx.buffer::<f32>(QUERIES.min(queries) * keys)?;
    let mut dp = cx.buffer::<f32>(QUERIES.min(queries) * keys)?;
    by_dtype!(&q, T => {
        let (q, k, v) = (T::elements(&q), T::elements(&k), T::elements(&v));
        let (dout, out) = (T::elements(&dout), T::elements(out));
        let [dq, dk, dv] = [&mut dq, &mut dk, &mut dv].map(|x| DisjointMut::new(&mut x[..]));
        for head in 0..heads {
            let kv_start = head / (heads / size.kv_heads) * dim;
            let of_k = Rows { data: k, start: kv_start, stride: k_stride };
            let of_v = Rows { data: v, start: kv_start, stride: k_stride };
            for first in (0..queries).step_by(QUERIES) {
                let count = QUERIES.min(queries - first);
                let q_start = first * q_stride + head * dim;
                let of_q = Rows { data: q, start: q_start, stride: q_stride };
                let of_dout = Rows { data: dout, start: q_start, stride: q_stride };
                for (left, right, scale, to) in [(of_q, of_k, scale, &mut scores), (of_dout, of_v, 1.0, &mut dp)] {
                    let data = DisjointMut::new(to);
                    let to = Placed { scale, start: 0, stride: keys, add: false, data: &data };
                    product(cx, &left, right, Orientation::ColsByDepth, [count, keys, dim], &to)?;
                }
                let of_dp = DisjointMut::new(&mut dp);
                cx.for_each_row(&mut scores[..count * keys], keys, |i, scores| {
                    // SAFETY: every query has a row of its own.
                    let dp = unsafe { of_dp.slice(i * keys..(i + 1) * keys) };
                    let delta = dot(&dout[q_start + i * q_stride..][..dim], &out[q_start + i * q_stride..][..dim]);
                    let lse = lse[(first + i) * heads + head];
                    gradient_row(cx.level, scores, dp, visible(&spec.mask, first + i, keys), lse, delta);
                });
                let ds = Rows { data: &dp[..], start: 0, stride: keys };
                let to = Placed { scale, start: q_start, stride: q_stride, add: false, data: &dq };
                product(cx, &ds, of_k, Orientation::DepthByCols, [count, dim, keys], &to)?;
                for (left, right, scale, to) in [(&dp, of_q, scale, &dk), (&scores, of_dout, 1.0, &dv)] {
                    let left = Columns { data: &left[..], start: 0, stride: keys };
                    let to = Placed { scale, start: kv_start, stride: k_stride, add: true, data: to };
                    product(cx, &left, right, Orientation::DepthByCols, [keys, dim, count], &to)?;
                }
            }
        }
    });
    let round = |x, shape| movement::cast(cx, &f32::into_tensor(x, shape), dtype);
    let kv_shape = || [keys, k_stride].into();
    Ok([round(dq, size.result())?, round(dk, kv_shape())?, round(dv, kv_shape())?])
}

fn dot<T: Element>(x: &[T], y: &[T]) -> f32 {
    x.iter().zip(y).map(|(x, y)| f64::from(x.widen()) * f64::from(y.widen())).sum::<f64>() as f32
}

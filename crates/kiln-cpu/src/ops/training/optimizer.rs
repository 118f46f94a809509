//! Optimizer steps: a few operations per element, in f32.

use kiln_ops::Result;
use kiln_ops::Tensor as _;
use kiln_ops::training::{
    AdamWFactors, AdamWStep, AdamWTensor, BLOCK, CodeBook, ProdigyStep, ProdigyTensor, Quantized8,
    QuantizedAdamWTensor, shapes,
};

use crate::Context;
use crate::parallel::DisjointMut;
use crate::tensor::{CpuTensor, TensorElement};

/// Elements of a task: whole blocks of 8-bit state.
const CHUNK: usize = 64 * BLOCK;

/// An AdamW step and its factors.
struct AdamW<'a> {
    step: &'a AdamWStep,
    factors: AdamWFactors,
}

impl<'a> AdamW<'a> {
    fn new(step: &'a AdamWStep) -> AdamW<'a> {
        AdamW { step, factors: step.factors() }
    }

    /// Updates one element; returns its parameter.
    fn apply(&self, param: f32, grad: f32, m: &mut f32, v: &mut f32) -> f32 {
        let AdamWStep { grad_scale, betas, eps, .. } = *self.step;
        let AdamWFactors { rest, keep, step_size, root } = self.factors;
        let g = grad_scale * grad;
        *m = betas[0] * *m + rest[0] * g;
        *v = betas[1] * *v + rest[1] * g * g;
        keep * param - step_size * *m / (v.sqrt() / root + eps)
    }
}

pub(crate) fn upload_quantized(_: &Context, host: &Quantized8) -> Result<Quantized8> {
    shapes::upload_quantized(host)?;
    Ok(host.clone())
}

pub(crate) fn download_quantized(_: &Context, x: &Quantized8) -> Result<Quantized8> {
    Ok(x.clone())
}

pub(crate) fn adamw(
    cx: &Context,
    tensors: &mut [AdamWTensor<'_, CpuTensor>],
    step: &AdamWStep,
) -> Result<()> {
    shapes::adamw(tensors)?;
    let step = AdamW::new(step);
    for t in tensors {
        let shape = t.param.shape().clone();
        let n = shape.numel();
        let [mut param, mut m, mut v] = [cx.buffer::<f32>(n)?, cx.buffer::<f32>(n)?, cx.buffer::<f32>(n)?];
        let (grad, old) = (f32::elements(t.grad), [&*t.param, &*t.m, &*t.v].map(f32::elements));
        let (to_m, to_v) = (DisjointMut::new(&mut m), DisjointMut::new(&mut v));
        cx.pool.for_each_chunk(&mut param, CHUNK, |chunk, param| {
            let range = chunk * CHUNK..chunk * CHUNK + param.len();
            // SAFETY: every chunk has a range of its own.
            let (m, v) = unsafe { (to_m.slice(range.clone()), to_v.slice(range.clone())) };
            let [old_param, old_m, old_v] = old.map(|old| &old[range.clone()]);
            m.copy_from_slice(old_m);
            v.copy_from_slice(old_v);
            for (i, grad) in grad[range].iter().enumerate() {
                param[i] = step.apply(old_param[i], *grad, &mut m[i], &mut v[i]);
            }
        });
        *t.param = f32::into_tensor(param, shape.clone());
        *t.m = f32::into_tensor(m, shape.clone());
        *t.v = f32::into_tensor(v, shape);
    }
    Ok(())
}

pub(crate) fn adamw_8bit(
    cx: &Context,
    tensors: &mut [QuantizedAdamWTensor<'_, CpuTensor, Quantized8>],
    step: &AdamWStep,
) -> Result<()> {
    shapes::adamw_8bit(tensors, |state| state.codes.len())?;
    let step = AdamW::new(step);
    let books = [CodeBook::signed(), CodeBook::unsigned()];
    for t in tensors {
        let shape = t.param.shape().clone();
        let mut param = cx.buffer::<f32>(shape.numel())?;
        let (grad, old) = (f32::elements(t.grad), f32::elements(t.param));
        let [m, v] = [&mut *t.m, &mut *t.v];
        let codes = [DisjointMut::new(&mut m.codes), DisjointMut::new(&mut v.codes)];
        let scales = [DisjointMut::new(&mut m.scales), DisjointMut::new(&mut v.scales)];
        cx.pool.for_each_chunk(&mut param, BLOCK, |block, param| {
            let range = block * BLOCK..block * BLOCK + param.len();
            // SAFETY: every block has codes and a scale of its own.
            let codes = [0, 1].map(|i| unsafe { codes[i].slice(range.clone()) });
            // SAFETY: as above.
            let scales = [0, 1].map(|i| unsafe { scales[i].slice(block..block + 1) });
            let mut state = [[0f32; BLOCK]; 2];
            for i in 0..2 {
                let values = codes[i].iter().map(|code| books[i].value(*code) * scales[i][0]);
                state[i].iter_mut().zip(values).for_each(|(state, value)| *state = value);
            }
            let [m, v] = &mut state;
            for (i, grad) in grad[range.clone()].iter().enumerate() {
                param[i] = step.apply(old[range.start + i], *grad, &mut m[i], &mut v[i]);
            }
            for (((book, state), codes), scales) in books.iter().zip(&state).zip(codes).zip(scales) {
                book.quantize(&state[..param.len()], codes, scales);
            }
        });
        *t.param = f32::into_tensor(param, shape);
    }
    Ok(())
}

pub(crate) fn prodigy_moments(
    cx: &Context,
    tensors: &mut [ProdigyTensor<'_, CpuTensor>],
    step: &ProdigyStep,
) -> Result<CpuTensor> {
    shapes::prodigy(tensors)?;
    let [beta1, beta2, beta3] = step.betas;
    let [first, second] = [step.d * (1.0 - beta1), step.d * step.d * (1.0 - beta2)];
    let mut totals = [0f64; 2];
    for t in tensors {
        let shape = t.param.shape().clone();
        let n = shape.numel();
        let [mut m, mut v, mut s] = [cx.buffer::<f32>(n)?, cx.buffer::<f32>(n)?, cx.buffer::<f32>(n)?];
        let [param, start, grad] = [&*t.param, t.start, t.grad].map(f32::elements);
        let old = [&*t.m, &*t.v, &*t.s].map(f32::elements);
        let mut sums = vec![[0f64; 2]; n.div_ceil(CHUNK)];
        let to = [&mut m, &mut v, &mut s].map(|x| DisjointMut::new(&mut x[..]));
        cx.pool.for_each_chunk(&mut sums, 1, |chunk, sums| {
            let range = chunk * CHUNK..n.min((chunk + 1) * CHUNK);
            // SAFETY: every chunk has a range of its own.
            let [m, v, s] = [0, 1, 2].map(|i| unsafe { to[i].slice(range.clone()) });
            for (i, at) in range.enumerate() {
                let g = step.grad_scale * grad[at];
                sums[0][0] += f64::from(g) * (f64::from(start[at]) - f64::from(param[at]));
                m[i] = beta1 * old[0][at] + first * g;
                v[i] = beta2 * old[1][at] + second * g * g;
                s[i] = beta3 * old[2][at] + step.s_factor * g;
                sums[0][1] += f64::from(s[i].abs());
            }
        });
        for sums in sums {
            totals = [totals[0] + sums[0], totals[1] + sums[1]];
        }
        for (to, new) in [(&mut *t.m, m), (&mut *t.v, v), (&mut *t.s, s)] {
            *to = f32::into_tensor(new, shape.clone());
        }
    }
    let mut out = cx.buffer::<f32>(2)?;
    out.copy_from_slice(&totals.map(|total| total as f32));
    Ok(f32::into_tensor(out, [1, 2].into()))
}

pub(crate) fn prodigy_update(
    cx: &Context,
    tensors: &mut [ProdigyTensor<'_, CpuTensor>],
    lr: f32,
    decay: f32,
    eps: f32,
) -> Result<()> {
    shapes::prodigy(tensors)?;
    let keep = (1.0 - f64::from(lr) * f64::from(decay)) as f32;
    for t in tensors {
        let shape = t.param.shape().clone();
        let mut param = cx.buffer::<f32>(shape.numel())?;
        let [old, m, v] = [&*t.param, &*t.m, &*t.v].map(f32::elements);
        cx.pool.for_each_chunk(&mut param, CHUNK, |chunk, param| {
            for (i, param) in param.iter_mut().enumerate() {
                let at = chunk * CHUNK + i;
                *param = keep * old[at] - lr * m[at] / (v[at].sqrt() + eps);
            }
        });
        *t.param = f32::into_tensor(param, shape);
    }
    Ok(())
}

//! Optimizer steps.

use kiln_tensor::{DType, HostTensor};

use crate::Result;
use crate::reference::values::{tensor, values};
use crate::training::shapes;
use crate::training::{
    AdamWStep, AdamWTensor, BLOCK, CodeBook, ProdigyStep, ProdigyTensor, Quantized8, QuantizedAdamWTensor,
};

type T = HostTensor;

/// Parameters and moments after a step of AdamW.
fn adamw_step(param: &mut [f64], grad: &[f64], m: &mut [f64], v: &mut [f64], step: &AdamWStep) {
    let [beta1, beta2] = step.betas.map(f64::from);
    let [step_size, root] = step.corrections();
    let keep = 1.0 - f64::from(step.lr) * f64::from(step.decay);
    for (i, grad) in grad.iter().enumerate() {
        let g = f64::from(step.grad_scale) * grad;
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        param[i] = keep * param[i] - step_size * m[i] / (v[i].sqrt() / root + f64::from(step.eps));
    }
}

pub(crate) fn adamw(tensors: &mut [AdamWTensor<'_, T>], step: &AdamWStep) -> Result<()> {
    shapes::adamw(tensors)?;
    for t in tensors {
        let (mut param, mut m, mut v) = (values(t.param)?, values(t.m)?, values(t.v)?);
        adamw_step(&mut param, &values(t.grad)?, &mut m, &mut v, step);
        for (to, new) in [(&mut t.param, param), (&mut t.m, m), (&mut t.v, v)] {
            **to = tensor(to.shape(), DType::F32, new)?;
        }
    }
    Ok(())
}

pub(crate) fn upload_quantized(host: &Quantized8) -> Result<Quantized8> {
    shapes::upload_quantized(host)?;
    Ok(host.clone())
}

pub(crate) fn download_quantized(x: &Quantized8) -> Result<Quantized8> {
    Ok(x.clone())
}

fn dequantize(book: &CodeBook, state: &Quantized8) -> Vec<f64> {
    let value = |(i, &code): (usize, &u8)| f64::from(book.value(code)) * f64::from(state.scales[i / BLOCK]);
    state.codes.iter().enumerate().map(value).collect()
}

pub(crate) fn adamw_8bit(
    tensors: &mut [QuantizedAdamWTensor<'_, T, Quantized8>],
    step: &AdamWStep,
) -> Result<()> {
    shapes::adamw_8bit(tensors, |state| state.codes.len())?;
    let (signed, unsigned) = (CodeBook::signed(), CodeBook::unsigned());
    for t in tensors {
        let mut param = values(t.param)?;
        let (mut m, mut v) = (dequantize(signed, t.m), dequantize(unsigned, t.v));
        adamw_step(&mut param, &values(t.grad)?, &mut m, &mut v, step);
        *t.param = tensor(t.param.shape(), DType::F32, param)?;
        for (book, new, state) in [(signed, m, &mut *t.m), (unsigned, v, &mut *t.v)] {
            let new: Vec<f32> = new.into_iter().map(|v| v as f32).collect();
            book.quantize(&new, &mut state.codes, &mut state.scales);
        }
    }
    Ok(())
}

pub(crate) fn prodigy_moments(tensors: &mut [ProdigyTensor<'_, T>], step: &ProdigyStep) -> Result<T> {
    shapes::prodigy(tensors)?;
    let [beta1, beta2, beta3] = step.betas.map(f64::from);
    let (d, s_factor) = (f64::from(step.d), f64::from(step.s_factor));
    let (mut numerator, mut denominator) = (0.0, 0.0);
    for t in tensors {
        let (param, start, grad) = (values(t.param)?, values(t.start)?, values(t.grad)?);
        let (mut m, mut v, mut s) = (values(t.m)?, values(t.v)?, values(t.s)?);
        for (i, grad) in grad.iter().enumerate() {
            let g = f64::from(step.grad_scale) * grad;
            numerator += g * (start[i] - param[i]);
            m[i] = beta1 * m[i] + d * (1.0 - beta1) * g;
            v[i] = beta2 * v[i] + d * d * (1.0 - beta2) * g * g;
            s[i] = beta3 * s[i] + s_factor * g;
            denominator += s[i].abs();
        }
        for (to, new) in [(&mut t.m, m), (&mut t.v, v), (&mut t.s, s)] {
            **to = tensor(to.shape(), DType::F32, new)?;
        }
    }
    tensor([1, 2], DType::F32, vec![numerator, denominator])
}

pub(crate) fn prodigy_update(
    tensors: &mut [ProdigyTensor<'_, T>],
    lr: f32,
    decay: f32,
    eps: f32,
) -> Result<()> {
    shapes::prodigy(tensors)?;
    let [lr, decay, eps] = [lr, decay, eps].map(f64::from);
    for t in tensors {
        let (m, v) = (values(t.m)?, values(t.v)?);
        let step = |(i, param): (usize, f64)| param * (1.0 - lr * decay) - lr * m[i] / (v[i].sqrt() + eps);
        *t.param = tensor(
            t.param.shape(),
            DType::F32,
            values(t.param)?.into_iter().enumerate().map(step).collect(),
        )?;
    }
    Ok(())
}

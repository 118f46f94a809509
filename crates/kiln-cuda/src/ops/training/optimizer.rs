//! Optimizer steps. Parameters and their state are changed in place, or copied first where something else refers to them.

use kiln_ops::training::{
    AdamWStep, AdamWTensor, BLOCK, CodeBook, ProdigyStep, ProdigyTensor, Quantized8, QuantizedAdamWTensor,
    shapes,
};
use kiln_ops::{Result, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use super::sum_blocks;
use crate::context::{Context, int};
use crate::kernels::{
    ADAMW, ADAMW_8BIT, AdamW, AdamW8Bit, AdamWArgs, PRODIGY_MOMENTS, PRODIGY_UPDATE, ProdigyArgs,
    ProdigyMoments, ProdigyUpdate, SUM_PARTIALS, SUM_SQUARES, SumPartials, SumSquares,
};
use crate::ops::THREADS;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

/// Optimizer state in 8 bits on the device.
pub struct CudaQuantized {
    len: usize,
    codes: DeviceBuffer,
    scales: DeviceBuffer,
}

impl CudaQuantized {
    pub(crate) fn from_host(cx: &Context, host: &Quantized8) -> Result<CudaQuantized> {
        shapes::upload_quantized(host)?;
        let (codes, scales) = (cx.allocate(host.codes.len())?, cx.allocate(4 * host.scales.len())?);
        cx.check(cx.upload(&host.codes, codes.ptr(cx)))?;
        cx.check(cx.upload(bytemuck::cast_slice(&host.scales), scales.ptr(cx)))?;
        Ok(CudaQuantized { len: host.codes.len(), codes, scales })
    }

    pub(crate) fn to_host(&self, cx: &Context) -> Result<Quantized8> {
        let mut host = Quantized8 { codes: vec![0; self.len], scales: vec![0.0; self.len.div_ceil(BLOCK)] };
        cx.check(cx.download(self.codes.ptr(cx), &mut host.codes))?;
        cx.check(cx.download(self.scales.ptr(cx), bytemuck::cast_slice_mut(&mut host.scales)))?;
        Ok(host)
    }
}

/// The address of a tensor that will be changed; copies it if its memory is shared.
fn changed(cx: &Context, x: &mut CudaTensor) -> Result<DevicePtr> {
    if !x.is_unique() {
        let copy = CudaTensor::new(cx, x.shape(), x.dtype())?;
        cx.check(cx.copy(x.ptr(cx), copy.ptr(cx), x.shape().numel() * x.dtype().size()))?;
        *x = copy;
    }
    Ok(x.ptr(cx))
}

fn adamw_args(step: &AdamWStep) -> AdamWArgs {
    let [step_size, root] = step.corrections().map(|v| v as f32);
    AdamWArgs {
        grad_scale: step.grad_scale,
        betas: step.betas,
        rest: step.betas.map(|beta| (1.0 - f64::from(beta)) as f32),
        keep: (1.0 - f64::from(step.lr) * f64::from(step.decay)) as f32,
        step_size,
        root,
        eps: step.eps,
    }
}

pub(crate) fn adamw(
    cx: &Context,
    tensors: &mut [AdamWTensor<'_, CudaTensor>],
    step: &AdamWStep,
) -> Result<()> {
    shapes::adamw(tensors)?;
    let args = adamw_args(step);
    for t in tensors {
        let n = t.param.shape().numel();
        let parameters = AdamW {
            args,
            param: changed(cx, t.param)?,
            grad: t.grad.ptr(cx),
            m: changed(cx, t.m)?,
            v: changed(cx, t.v)?,
            n: n as i64,
        };
        cx.launch(ADAMW, [n.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    }
    Ok(())
}

pub(crate) fn adamw_8bit(
    cx: &Context,
    tensors: &mut [QuantizedAdamWTensor<'_, CudaTensor, CudaQuantized>],
    step: &AdamWStep,
) -> Result<()> {
    shapes::adamw_8bit(tensors, |state| state.len)?;
    let args = adamw_args(step);
    let values = [CodeBook::signed(), CodeBook::unsigned()].map(|book| *book.values()).concat();
    let books = CudaTensor::from_host(cx, &HostTensor::from_f32([values.len()], values)?, DType::F32)?;
    for t in tensors {
        let n = t.param.shape().numel();
        let parameters = AdamW8Bit {
            args,
            param: changed(cx, t.param)?,
            grad: t.grad.ptr(cx),
            m: t.m.codes.ptr(cx),
            m_scales: t.m.scales.ptr(cx),
            v: t.v.codes.ptr(cx),
            v_scales: t.v.scales.ptr(cx),
            books: books.ptr(cx),
            n: n as i64,
        };
        cx.launch(ADAMW_8BIT, [n.div_ceil(BLOCK), 1], BLOCK, 0, &parameters)?;
    }
    Ok(())
}

pub(crate) fn prodigy_moments(
    cx: &Context,
    tensors: &mut [ProdigyTensor<'_, CudaTensor>],
    step: &ProdigyStep,
) -> Result<CudaTensor> {
    shapes::prodigy(tensors)?;
    let [beta1, beta2, _] = step.betas;
    let args = ProdigyArgs {
        grad_scale: step.grad_scale,
        betas: step.betas,
        first: step.d * (1.0 - beta1),
        second: step.d * step.d * (1.0 - beta2),
        s_factor: step.s_factor,
    };
    let all: usize = tensors.iter().map(|t| sum_blocks(t.param.shape().numel()).0).sum();
    let partials = cx.allocate(8 * all)?;
    let mut at = partials.ptr(cx);
    for t in tensors {
        let n = t.param.shape().numel();
        let (blocks, per_block) = sum_blocks(n);
        let parameters = ProdigyMoments {
            args,
            param: t.param.ptr(cx),
            grad: t.grad.ptr(cx),
            start: t.start.ptr(cx),
            m: changed(cx, t.m)?,
            v: changed(cx, t.v)?,
            s: changed(cx, t.s)?,
            partials: at,
            n: n as i64,
            per_block: per_block as i64,
        };
        cx.launch(PRODIGY_MOMENTS, [blocks, 1], THREADS, 0, &parameters)?;
        at += 8 * blocks as u64;
    }
    sum_partials(cx, &partials, all, 2)
}

pub(crate) fn prodigy_update(
    cx: &Context,
    tensors: &mut [ProdigyTensor<'_, CudaTensor>],
    lr: f32,
    decay: f32,
    eps: f32,
) -> Result<()> {
    shapes::prodigy(tensors)?;
    let keep = (1.0 - f64::from(lr) * f64::from(decay)) as f32;
    for t in tensors {
        let n = t.param.shape().numel();
        let (m, v) = (t.m.ptr(cx), t.v.ptr(cx));
        let parameters = ProdigyUpdate { param: changed(cx, t.param)?, m, v, n: n as i64, keep, lr, eps };
        cx.launch(PRODIGY_UPDATE, [n.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    }
    Ok(())
}

pub(crate) fn sum_squares(cx: &Context, xs: &[&CudaTensor]) -> Result<CudaTensor> {
    shapes::sum_squares(xs)?;
    let all: usize = xs.iter().map(|x| sum_blocks(x.shape().numel()).0).sum();
    let partials = cx.allocate(4 * all)?;
    let mut at = partials.ptr(cx);
    for x in xs {
        let n = x.shape().numel();
        let (blocks, per_block) = sum_blocks(n);
        let parameters = SumSquares { x: x.ptr(cx), partials: at, n: n as i64, per_block: per_block as i64 };
        cx.launch(SUM_SQUARES, [blocks, 1], THREADS, 0, &parameters)?;
        at += 4 * blocks as u64;
    }
    sum_partials(cx, &partials, all, 1)
}

/// Sums lists of partial sums, interleaved: f32 `[1, columns]`.
fn sum_partials(cx: &Context, partials: &DeviceBuffer, count: usize, columns: usize) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, [1, columns], DType::F32)?;
    let (count, columns) = (int("sum", count)?, int("sum", columns)?);
    let parameters = SumPartials { partials: partials.ptr(cx), out: out.ptr(cx), count, columns };
    cx.launch(SUM_PARTIALS, [1, 1], THREADS, 0, &parameters)?;
    Ok(out)
}

//! Optimizer steps, one launch for all tensors. Parameters and their state are changed in place, or copied first where
//! something else refers to them.

use kiln_ops::training::{
    AdamWFactors, AdamWStep, AdamWTensor, BLOCK, CodeBook, ProdigyStep, ProdigyTensor, Quantized8,
    QuantizedAdamWTensor, shapes,
};
use kiln_ops::{Result, Tensor as _};
use kiln_tensor::{DType, HostTensor};

use crate::context::{Context, int};
use crate::kernels::{AdamWArgs, Kernel, Parameters, ProdigyArgs, kernels};
use crate::ops::grid::THREADS;
use crate::ops::movement::upload;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;
use crate::tensor::CudaTensor;

kernels! {
    "optimizer" {
        AdamW(args: AdamWArgs, tensors: DevicePtr, count: i32, per_block: i32):
            ADAMW = "adamw";
        AdamW8Bit(args: AdamWArgs, tensors: DevicePtr, count: i32, books: DevicePtr):
            ADAMW_8BIT = "adamw_8bit";
        ProdigyMoments(args: ProdigyArgs, tensors: DevicePtr, count: i32, per_block: i32,
            partials: DevicePtr):
            PRODIGY_MOMENTS = "prodigy_moments";
        ProdigyUpdate(tensors: DevicePtr, count: i32, per_block: i32, keep: f32, lr: f32, eps: f32):
            PRODIGY_UPDATE = "prodigy_update";
        SumSquares(tensors: DevicePtr, count: i32, per_block: i32, partials: DevicePtr):
            SUM_SQUARES = "sum_squares";
        SumPartials(partials: DevicePtr, out: DevicePtr, count: i32, columns: i32):
            SUM_PARTIALS = "sum_partials";
    }
}

/// Elements of a tensor that a block of threads works on.
const PER_BLOCK: usize = 8 * THREADS;

/// Optimizer state in 8 bits on the device.
pub struct CudaQuantized {
    len: usize,
    codes: DeviceBuffer,
    scales: DeviceBuffer,
}

pub(crate) fn upload_quantized(cx: &Context, host: &Quantized8) -> Result<CudaQuantized> {
    shapes::upload_quantized(host)?;
    let (codes, scales) = (cx.allocate(host.codes.len())?, cx.allocate(4 * host.scales.len())?);
    cx.check(cx.upload(&host.codes, codes.ptr(cx)))?;
    cx.check(cx.upload(bytemuck::cast_slice(&host.scales), scales.ptr(cx)))?;
    Ok(CudaQuantized { len: host.codes.len(), codes, scales })
}

pub(crate) fn download_quantized(cx: &Context, x: &CudaQuantized) -> Result<Quantized8> {
    let mut host = Quantized8 { codes: vec![0; x.len], scales: vec![0.0; x.len.div_ceil(BLOCK)] };
    cx.check(cx.download(x.codes.ptr(cx), &mut host.codes))?;
    cx.check(cx.download(x.scales.ptr(cx), bytemuck::cast_slice_mut(&mut host.scales)))?;
    Ok(host)
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

/// The addresses of a tensor, of its gradient and of its state, as in `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct TensorAddresses {
    at: [DevicePtr; 6],
    n: i64,
    first_block: i64,
}

/// The tensors of a launch, on the device.
struct TensorList {
    buffer: DeviceBuffer,
    count: i32,
    blocks: usize,
}

impl TensorList {
    /// Takes each tensor's addresses and its number of elements, of which every block gets `per_block`.
    fn new<const N: usize>(
        cx: &Context,
        tensors: impl IntoIterator<Item = Result<([DevicePtr; N], usize)>>,
        per_block: usize,
    ) -> Result<TensorList> {
        let mut blocks = 0;
        let mut list = Vec::new();
        for tensor in tensors {
            let (addresses, n) = tensor?;
            let mut at = [0; 6];
            at[..N].copy_from_slice(&addresses);
            list.push(TensorAddresses { at, n: n as i64, first_block: blocks as i64 });
            blocks += n.div_ceil(per_block);
        }
        let bytes: &[u8] = bytemuck::cast_slice(&list);
        let buffer = cx.allocate(bytes.len())?;
        cx.check(cx.upload(bytes, buffer.ptr(cx)))?;
        Ok(TensorList { buffer, count: int("optimizer", list.len())?, blocks })
    }

    fn launch<P: Parameters>(&self, cx: &Context, kernel: Kernel<P>, parameters: &P) -> Result<()> {
        if self.blocks == 0 {
            return Ok(());
        }
        cx.launch(kernel, [self.blocks, 1], THREADS, 0, parameters)
    }
}

fn adamw_args(step: &AdamWStep) -> AdamWArgs {
    let AdamWFactors { rest, keep, step_size, root } = step.factors();
    let AdamWStep { grad_scale, betas, eps, .. } = *step;
    AdamWArgs { grad_scale, betas, rest, keep, step_size, root, eps }
}

pub(crate) fn adamw(
    cx: &Context,
    tensors: &mut [AdamWTensor<'_, CudaTensor>],
    step: &AdamWStep,
) -> Result<()> {
    shapes::adamw(tensors)?;
    let addresses = tensors.iter_mut().map(|t| {
        let at = [changed(cx, t.param)?, t.grad.ptr(cx), changed(cx, t.m)?, changed(cx, t.v)?];
        Ok((at, t.param.shape().numel()))
    });
    let list = TensorList::new(cx, addresses, PER_BLOCK)?;
    let parameters = AdamW {
        args: adamw_args(step),
        tensors: list.buffer.ptr(cx),
        count: list.count,
        per_block: PER_BLOCK as i32,
    };
    list.launch(cx, ADAMW, &parameters)
}

pub(crate) fn adamw_8bit(
    cx: &Context,
    tensors: &mut [QuantizedAdamWTensor<'_, CudaTensor, CudaQuantized>],
    step: &AdamWStep,
) -> Result<()> {
    shapes::adamw_8bit(tensors, |state| state.len)?;
    let values = [CodeBook::signed(), CodeBook::unsigned()].map(|book| *book.values()).concat();
    let books = upload(cx, &HostTensor::from_f32([values.len()], values)?, DType::F32)?;
    let addresses = tensors.iter_mut().map(|t| {
        let [m, v] = [&t.m, &t.v].map(|state| [state.codes.ptr(cx), state.scales.ptr(cx)]);
        Ok(([changed(cx, t.param)?, t.grad.ptr(cx), m[0], m[1], v[0], v[1]], t.param.shape().numel()))
    });
    let list = TensorList::new(cx, addresses, BLOCK)?;
    let parameters = AdamW8Bit {
        args: adamw_args(step),
        tensors: list.buffer.ptr(cx),
        count: list.count,
        books: books.ptr(cx),
    };
    list.launch(cx, ADAMW_8BIT, &parameters)
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
    let addresses = tensors.iter_mut().map(|t| {
        let state = [changed(cx, t.m)?, changed(cx, t.v)?, changed(cx, t.s)?];
        let at = [t.param.ptr(cx), t.grad.ptr(cx), t.start.ptr(cx), state[0], state[1], state[2]];
        Ok((at, t.param.shape().numel()))
    });
    let list = TensorList::new(cx, addresses, PER_BLOCK)?;
    let partials = cx.allocate(8 * list.blocks)?;
    let parameters = ProdigyMoments {
        args,
        tensors: list.buffer.ptr(cx),
        count: list.count,
        per_block: PER_BLOCK as i32,
        partials: partials.ptr(cx),
    };
    list.launch(cx, PRODIGY_MOMENTS, &parameters)?;
    sum_partials(cx, &partials, list.blocks, 2)
}

pub(crate) fn prodigy_update(
    cx: &Context,
    tensors: &mut [ProdigyTensor<'_, CudaTensor>],
    lr: f32,
    decay: f32,
    eps: f32,
) -> Result<()> {
    shapes::prodigy(tensors)?;
    let addresses = tensors
        .iter_mut()
        .map(|t| Ok(([changed(cx, t.param)?, t.m.ptr(cx), t.v.ptr(cx)], t.param.shape().numel())));
    let list = TensorList::new(cx, addresses, PER_BLOCK)?;
    let parameters = ProdigyUpdate {
        tensors: list.buffer.ptr(cx),
        count: list.count,
        per_block: PER_BLOCK as i32,
        keep: (1.0 - f64::from(lr) * f64::from(decay)) as f32,
        lr,
        eps,
    };
    list.launch(cx, PRODIGY_UPDATE, &parameters)
}

pub(crate) fn sum_squares(cx: &Context, xs: &[&CudaTensor]) -> Result<CudaTensor> {
    shapes::sum_squares(xs)?;
    let list = TensorList::new(cx, xs.iter().map(|x| Ok(([x.ptr(cx)], x.shape().numel()))), PER_BLOCK)?;
    let partials = cx.allocate(4 * list.blocks)?;
    let parameters = SumSquares {
        tensors: list.buffer.ptr(cx),
        count: list.count,
        per_block: PER_BLOCK as i32,
        partials: partials.ptr(cx),
    };
    list.launch(cx, SUM_SQUARES, &parameters)?;
    sum_partials(cx, &partials, list.blocks, 1)
}

/// Sums lists of partial sums, interleaved: f32 `[1, columns]`.
fn sum_partials(cx: &Context, partials: &DeviceBuffer, count: usize, columns: usize) -> Result<CudaTensor> {
    let out = CudaTensor::new(cx, [1, columns], DType::F32)?;
    let (count, columns) = (int("sum", count)?, int("sum", columns)?);
    let parameters = SumPartials { partials: partials.ptr(cx), out: out.ptr(cx), count, columns };
    cx.launch(SUM_PARTIALS, [1, 1], THREADS, 0, &parameters)?;
    Ok(out)
}

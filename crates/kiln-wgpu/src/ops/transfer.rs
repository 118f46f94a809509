//! Copies between host and device. A download is recorded after all earlier work, and whoever needs its bytes waits for them.

use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use kiln_ops::{Pending, Result, Tensor, shapes};
use kiln_tensor::{DType, HostTensor};
use wgpu::{Buffer, BufferDescriptor, BufferUsages, ErrorFilter, MapMode, SubmissionIndex};

use super::elementwise::ELEMENT_COST;
use crate::context::{Context, Launch, Param, u};
use crate::device::{DeviceBuffer, resolve};
use crate::kernels::{ACTIVATIONS, Kernel};
use crate::tensor::WgpuTensor;

pub(super) const BYTES: Kernel = Kernel {
    name: "bytes",
    source: include_str!("../../kernels/bytes.wgsl"),
    constants: &[("T", ACTIVATIONS)],
};

pub(crate) fn upload(cx: &Context, host: &HostTensor, dtype: DType) -> Result<WgpuTensor> {
    let shape = shapes::upload(host, dtype)?;
    let x = WgpuTensor::new(cx, shape, dtype)?;
    cx.write(x.buffer(), 0, host.to_dtype(dtype)?.bytes())?;
    Ok(x)
}

/// A copy to the host that was submitted.
struct Download {
    cx: Context,
    /// What was copied, and where it starts in there. Empty tensors need no copy.
    copied: Option<(Buffer, Receiver<bool>, SubmissionIndex)>,
    skip: usize,
    bytes: usize,
}

impl Download {
    /// Records and submits the copy of `bytes` bytes from byte `start` on.
    fn start(cx: &Context, from: &DeviceBuffer, start: usize, bytes: usize) -> Result<Download> {
        if bytes == 0 {
            cx.check()?;
            return Ok(Download { cx: cx.clone(), copied: None, skip: 0, bytes });
        }
        let skip = start % 4;
        let size = (skip + bytes).next_multiple_of(4);
        let device = &cx.gpu().device;
        let scope = device.push_error_scope(ErrorFilter::OutOfMemory);
        let staging = device.create_buffer(&BufferDescriptor {
            label: Some("download"),
            size: size as u64,
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        if resolve(scope.pop()).is_some() {
            return Err(cx.out_of_memory(size));
        }
        cx.queue().copy([from.raw(), &staging], [start - skip, 0], size);
        let index = cx.queue().flush();
        let (sender, mapped) = mpsc::channel();
        staging.map_async(MapMode::Read, .., move |result| {
            // Whoever waited may have given up.
            let _ = sender.send(result.is_ok());
        });
        cx.check()?;
        Ok(Download { cx: cx.clone(), copied: Some((staging, mapped, index)), skip, bytes })
    }

    /// Waits for the bytes.
    fn finish(self) -> Result<Vec<u8>> {
        let Some((staging, mapped, index)) = self.copied else { return Ok(Vec::new()) };
        let polled = self.cx.queue().poll(index);
        self.cx.check()?;
        polled.map_err(|what| self.cx.failed(what))?;
        // Another thread's poll may be about to report it.
        if !matches!(mapped.recv_timeout(Duration::from_secs(60)), Ok(true)) {
            self.cx.check()?;
            return Err(self.cx.failed("a copy to the host failed"));
        }
        let view = staging.get_mapped_range(..).map_err(|e| self.cx.failed(e.to_string()))?;
        Ok(view[self.skip..self.skip + self.bytes].to_vec())
    }
}

pub(crate) fn download(cx: &Context, x: &WgpuTensor) -> Result<HostTensor> {
    download_async(cx, x)?()
}

pub(crate) fn download_async(cx: &Context, x: &WgpuTensor) -> Result<Pending<HostTensor>> {
    let (shape, dtype) = (x.shape().clone(), x.dtype());
    let bytes = shape.numel() * dtype.size();
    let download = Download::start(cx, x.buffer(), x.start_bytes(), bytes)?;
    Ok(Box::new(move || Ok(HostTensor::new(dtype, shape, download.finish()?.into())?)))
}

pub(crate) fn download_bytes(cx: &Context, x: &WgpuTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
    download_bytes_async(cx, x, scale, shift)?()
}

pub(crate) fn download_bytes_async(
    cx: &Context,
    x: &WgpuTensor,
    scale: f32,
    shift: f32,
) -> Result<Pending<Vec<u8>>> {
    let count = x.shape().numel();
    let words = WgpuTensor::new(cx, [count.div_ceil(4)], DType::F32)?;
    for chunk in cx.row_chunks(0..count.div_ceil(4), 16, 4 * ELEMENT_COST) {
        let elements = 4 * chunk.start..count.min(4 * chunk.end);
        cx.launch(&Launch {
            kernel: &BYTES,
            values: &[x.element()],
            tensors: &[x.elements(elements.clone()), words.elements(chunk.clone())],
            params: &[
                ("count", u(elements.len())),
                ("scale", Param::F32(scale)),
                ("shift", Param::F32(shift)),
            ],
            groups: Context::groups_for(chunk.len(), 1),
            cost: elements.len() as u64 * ELEMENT_COST,
        })?;
    }
    let download = Download::start(cx, words.buffer(), 0, count)?;
    Ok(Box::new(move || download.finish()))
}

pub(crate) fn fence(cx: &Context) -> Result<Pending<()>> {
    let index = cx.queue().flush();
    cx.check()?;
    let cx = cx.clone();
    Ok(Box::new(move || {
        let polled = cx.queue().poll(index);
        cx.check()?;
        polled.map_err(|what| cx.failed(what))
    }))
}

pub(crate) fn synchronize(cx: &Context) -> Result<()> {
    fence(cx)?()
}

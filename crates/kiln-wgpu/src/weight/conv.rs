//! Kernels of convolutions: matrices whose columns are the taps' channels.

use bytes::Bytes;
use kiln_ops::{Residency, Result, shapes};
use kiln_tensor::{DType, HostTensor};

use super::{Columns, Part, WeightRows, columns, parts};
use crate::context::Context;

/// A convolution's kernel and bias on the device.
pub struct WgpuConv {
    /// `[out, in, height, width]`.
    pub(crate) size: [usize; 4],
    pub(crate) parts: Vec<Part>,
    pub(crate) columns: Columns,
}

pub(crate) fn load_conv(cx: &Context, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<WgpuConv> {
    let size @ [out, ..] = shapes::load_conv(kernel, bias)?;
    let kernel = match kernel.dtype() {
        DType::BF16 | DType::F16 | DType::F32 => kernel.clone(),
        _ => kernel.to_dtype(DType::F32)?,
    };
    let rows = WeightRows::dense(&channels_last(&kernel, size)?)?;
    let columns = columns(cx, out, None, bias)?;
    Ok(WgpuConv { size, parts: parts(cx, vec![rows], Residency::Device)?, columns })
}

/// `[out, height · width · in]` from `[out, in, height, width]`.
fn channels_last(kernel: &HostTensor, [out, channels, height, width]: [usize; 4]) -> Result<HostTensor> {
    let (element, taps) = (kernel.dtype().size(), height * width);
    let row = channels * taps * element;
    let mut bytes = vec![0; out * row];
    for (from, to) in kernel.bytes().chunks_exact(row).zip(bytes.chunks_exact_mut(row)) {
        for (channel, from) in from.chunks_exact(taps * element).enumerate() {
            for (tap, from) in from.chunks_exact(element).enumerate() {
                to[(tap * channels + channel) * element..][..element].copy_from_slice(from);
            }
        }
    }
    Ok(HostTensor::new(kernel.dtype(), [out, channels * taps], Bytes::from(bytes))?)
}

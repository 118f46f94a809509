//! Weights of convolutions.

use std::sync::OnceLock;

use kiln_ops::{Error, Result, shapes};
use kiln_tensor::{DType, HostTensor, f16};

use super::matrix::{Matrix, vector};
use crate::context::Context;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;

/// A convolution on the device.
pub struct CudaConv {
    /// `[out, in, height, width]`.
    pub(crate) size: [usize; 4],
    /// `[out, height · width · in]`.
    pub(crate) kernel: Matrix,
    pub(crate) bias: Option<DeviceBuffer>,
    /// Taps folded for 2x upsampling (see `conv_hopper.cu`), computed on first use.
    folded: OnceLock<DeviceBuffer>,
    /// The same in f32.
    folded_f32: OnceLock<DeviceBuffer>,
}

pub(crate) fn load_conv(cx: &Context, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<CudaConv> {
    let size @ [out, input, height, width] = shapes::load_conv(kernel, bias)?;
    let cols = input * height * width;
    let flat = match kernel.dtype() {
        DType::BF16 => {
            HostTensor::from_bf16([out, cols], channels_last(&kernel.to_bf16()?, input, height * width))?
        }
        DType::F16 => {
            let values: Vec<f16> = bytemuck::pod_collect_to_vec(kernel.bytes());
            let bytes = bytemuck::cast_vec::<f16, u16>(channels_last(&values, input, height * width));
            let bytes: Vec<u8> = bytemuck::cast_slice(&bytes).to_vec();
            HostTensor::new(DType::F16, [out, cols], bytes.into())?
        }
        DType::F32 | DType::F64 => {
            HostTensor::from_f32([out, cols], channels_last(&kernel.to_f32()?, input, height * width))?
        }
        dtype => return Err(Error::DType { op: "conv", dtype, backend: cx.name() }),
    };
    let kernel = Matrix::new(cx, "conv", &[flat], cols)?;
    let bias = bias.map(|bias| vector(cx, "conv", std::slice::from_ref(bias))).transpose()?;
    Ok(CudaConv { size, kernel, bias, folded: OnceLock::new(), folded_f32: OnceLock::new() })
}

impl CudaConv {
    /// The address of weights folded for 2x upsampling, which `fold` writes on first use.
    pub(crate) fn folded(
        &self,
        cx: &Context,
        dtype: DType,
        fold: impl FnOnce(DevicePtr, usize) -> Result<()>,
    ) -> Result<DevicePtr> {
        let folded = if dtype == DType::F32 { &self.folded_f32 } else { &self.folded };
        if let Some(buffer) = folded.get() {
            return Ok(buffer.ptr(cx));
        }
        // The weights outlive a recording, so they must not be created by one.
        cx.check(cx.device("cuLaunchKernel"))?;
        let elements = 16 * self.size[0] * self.size[1];
        let buffer = cx.allocate(dtype.size() * elements)?;
        fold(buffer.ptr(cx), elements)?;
        // If two threads fold at once, either copy will do.
        Ok(folded.get_or_init(|| buffer).ptr(cx))
    }
}

/// Transposes `[out, in, taps]` to `[out, taps, in]`.
fn channels_last<T: Copy>(kernel: &[T], input: usize, taps: usize) -> Vec<T> {
    let mut last = Vec::with_capacity(kernel.len());
    for one in kernel.chunks_exact(input * taps) {
        for tap in 0..taps {
            last.extend((0..input).map(|channel| one[channel * taps + tap]));
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::channels_last;

    #[test]
    fn channels_become_the_last_axis() {
        // Two outputs, two inputs, three taps.
        let kernel: Vec<i32> = (0..12).collect();
        assert_eq!(channels_last(&kernel, 2, 3), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }
}

//! Weights on the device: as they are stored in their file, and in the type a product needs where that differs.

use std::sync::{Arc, OnceLock};

use kiln_ops::{Error, Result, shapes};
use kiln_tensor::{DType, HostTensor, LinearParts, bf16, f16};

use crate::Context;
use crate::device::Block;
use crate::ops::elementwise::cast_block;
use crate::sys::driver::DevicePtr;

/// A matrix on the device.
pub(crate) struct Matrix {
    pub rows: usize,
    pub cols: usize,
    /// F32, BF16 or F16, as in the file.
    pub stored: DType,
    block: Arc<Block>,
    /// Made when a product first needs them, and kept: making them again would cost more than the product.
    as_f32: OnceLock<Arc<Block>>,
    as_bf16: OnceLock<Arc<Block>>,
}

impl Matrix {
    /// Slabs of one width and dtype, below each other: one matrix there, however many they were here.
    fn new(cx: &Context, op: &'static str, slabs: &[HostTensor], cols: usize) -> Result<Matrix> {
        let mut stored = DType::F32;
        let mut hosts = Vec::with_capacity(slabs.len());
        for slab in slabs {
            let slab = match slab.dtype() {
                DType::F32 | DType::BF16 | DType::F16 => slab.clone(),
                DType::F64 => slab.to_dtype(DType::F32)?,
                dtype => return Err(Error::DType { op, dtype, backend: cx.name() }),
            };
            stored = slab.dtype();
            hosts.push(slab);
        }
        let rows = hosts.iter().map(|slab| slab.shape().rows()).sum();
        let block = cx.block(rows * cols * stored.size())?;
        let mut at = block.at();
        for slab in &hosts {
            cx.done(cx.device.upload(slab.bytes(), at))?;
            at += slab.bytes().len() as u64;
        }
        let (as_f32, as_bf16) = (OnceLock::new(), OnceLock::new());
        Ok(Matrix { rows, cols, stored, block: Arc::new(block), as_f32, as_bf16 })
    }

    /// Address of row `row` from column `column` on, as it is stored.
    pub fn stored_at(&self, row: usize, column: usize) -> DevicePtr {
        self.block.at() + ((row * self.cols + column) * self.stored.size()) as u64
    }

    /// The same, as f32 or bf16.
    pub fn at(&self, cx: &Context, dtype: DType, row: usize, column: usize) -> Result<DevicePtr> {
        if dtype == self.stored {
            return Ok(self.stored_at(row, column));
        }
        let form = if dtype == DType::BF16 { &self.as_bf16 } else { &self.as_f32 };
        let block = match form.get() {
            Some(block) => Arc::clone(block),
            None => {
                let block = Arc::new(cx.block(self.rows * self.cols * dtype.size())?);
                cast_block(cx, self.stored, self.block.at(), dtype, block.at(), self.rows * self.cols)?;
                // Of two threads that come here at once one is second, and its copy is as good.
                Arc::clone(form.get_or_init(|| block))
            }
        };
        Ok(block.at() + ((row * self.cols + column) * dtype.size()) as u64)
    }
}

/// A bias or another small f32 vector.
fn vector(cx: &Context, op: &'static str, host: &HostTensor) -> Result<Block> {
    let host = match host.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => host.to_dtype(DType::F32)?,
        dtype => return Err(Error::DType { op, dtype, backend: cx.name() }),
    };
    let block = cx.block(host.bytes().len())?;
    cx.done(cx.device.upload(host.bytes(), block.at()))?;
    Ok(block)
}

/// A linear layer on the device.
pub struct CudaWeight {
    pub(crate) matrix: Matrix,
    pub(crate) bias: Option<Block>,
    pub(crate) deltas: Vec<LowRank>,
}

/// A low-rank update of the outputs from `row` on.
pub(crate) struct LowRank {
    pub row: usize,
    pub down: Matrix,
    pub up: Matrix,
    pub scale: f32,
}

impl CudaWeight {
    pub(crate) fn new(cx: &Context, parts: LinearParts) -> Result<CudaWeight> {
        let [_, cols] = shapes::weight(&parts)?;
        let matrix = Matrix::new(cx, "weight", &parts.slabs, cols)?;
        let bias = parts.bias.as_ref().map(|bias| vector(cx, "weight", bias)).transpose()?;
        let mut deltas = Vec::new();
        // A rank of 0 changes nothing.
        for delta in parts.deltas.iter().filter(|delta| delta.rank() > 0 && delta.rows() > 0) {
            deltas.push(LowRank {
                row: delta.row,
                down: Matrix::new(cx, "weight", std::slice::from_ref(&delta.down), cols)?,
                up: Matrix::new(cx, "weight", std::slice::from_ref(&delta.up), delta.rank())?,
                scale: delta.scale,
            });
        }
        Ok(CudaWeight { matrix, bias, deltas })
    }

    pub(crate) fn size(&self) -> [usize; 2] {
        [self.matrix.rows, self.matrix.cols]
    }
}

/// A convolution on the device.
pub struct CudaConv {
    /// `[out, in, height, width]`.
    pub(crate) size: [usize; 4],
    /// `[out, height · width · in]`.
    pub(crate) kernel: Matrix,
    pub(crate) bias: Option<Block>,
}

impl CudaConv {
    pub(crate) fn new(cx: &Context, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<CudaConv> {
        let size @ [out, input, height, width] = shapes::conv(kernel, bias)?;
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
        let bias = bias.map(|bias| vector(cx, "conv", bias)).transpose()?;
        Ok(CudaConv { size, kernel, bias })
    }
}

/// `[out, in, taps]` as `[out, taps, in]`.
fn channels_last<T: Copy>(kernel: &[T], input: usize, taps: usize) -> Vec<T> {
    let mut last = Vec::with_capacity(kernel.len());
    for one in kernel.chunks_exact(input * taps) {
        for tap in 0..taps {
            last.extend((0..input).map(|channel| one[channel * taps + tap]));
        }
    }
    last
}

const _: () = assert!(size_of::<bf16>() == 2 && size_of::<f16>() == 2);

#[cfg(test)]
mod tests {
    use super::channels_last;

    #[test]
    fn a_kernels_channels_come_last() {
        // Two outputs, two inputs, three taps.
        let kernel: Vec<i32> = (0..12).collect();
        assert_eq!(channels_last(&kernel, 2, 3), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }
}

//! Dense matrices and f32 vectors.

use std::sync::OnceLock;

use kiln_ops::{Error, Result};
use kiln_tensor::{DType, HostTensor};

use crate::context::Context;
use crate::ops::elementwise::cast_buffer;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;

/// A matrix on the device.
pub(crate) struct Matrix {
    pub rows: usize,
    pub cols: usize,
    /// F32, BF16 or F16, as in the file.
    pub stored: DType,
    pub buffer: DeviceBuffer,
    /// Converted copies, created on first use and kept: converting again would cost more than the product.
    as_f32: OnceLock<DeviceBuffer>,
    as_bf16: OnceLock<DeviceBuffer>,
}

impl Matrix {
    /// Uploads matrices of one width and dtype, stacked by rows.
    pub fn new(cx: &Context, op: &'static str, matrices: &[HostTensor], cols: usize) -> Result<Matrix> {
        let mut stored = DType::F32;
        let mut hosts = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            let matrix = match matrix.dtype() {
                DType::F32 | DType::BF16 | DType::F16 => matrix.clone(),
                DType::F64 => matrix.to_dtype(DType::F32)?,
                dtype => return Err(Error::DType { op, dtype, backend: cx.name() }),
            };
            stored = matrix.dtype();
            hosts.push(matrix);
        }
        let rows = hosts.iter().map(|matrix| matrix.shape().rows()).sum();
        let buffer = cx.allocate(rows * cols * stored.size())?;
        let mut at = buffer.ptr(cx);
        for matrix in &hosts {
            cx.check(cx.upload(matrix.bytes(), at))?;
            at += matrix.bytes().len() as u64;
        }
        Ok(Matrix::from_buffer(rows, cols, stored, buffer))
    }

    pub fn from_buffer(rows: usize, cols: usize, stored: DType, buffer: DeviceBuffer) -> Matrix {
        let (as_f32, as_bf16) = (OnceLock::new(), OnceLock::new());
        Matrix { rows, cols, stored, buffer, as_f32, as_bf16 }
    }

    /// Address of an element in the stored dtype.
    pub fn stored_ptr(&self, cx: &Context, row: usize, column: usize) -> DevicePtr {
        self.buffer.ptr(cx) + ((row * self.cols + column) * self.stored.size()) as u64
    }

    /// Address of an element in f32 or bf16, converting the matrix if needed.
    pub fn ptr(&self, cx: &Context, dtype: DType, row: usize, column: usize) -> Result<DevicePtr> {
        if dtype == self.stored {
            return Ok(self.stored_ptr(cx, row, column));
        }
        let form = if dtype == DType::BF16 { &self.as_bf16 } else { &self.as_f32 };
        let buffer = match form.get() {
            Some(buffer) => buffer.clone(),
            None => {
                // The copy outlives a recording, so it must not be created by one.
                cx.check(cx.device("cuLaunchKernel"))?;
                let buffer = cx.allocate(self.rows * self.cols * dtype.size())?;
                cast_buffer(
                    cx,
                    self.stored,
                    self.buffer.ptr(cx),
                    dtype,
                    buffer.ptr(cx),
                    self.rows * self.cols,
                )?;
                // If two threads convert at once, either copy will do.
                form.get_or_init(|| buffer).clone()
            }
        };
        Ok(buffer.ptr(cx) + ((row * self.cols + column) * dtype.size()) as u64)
    }
}

/// Uploads f32 vectors, concatenated: a bias, or the scales of rows.
pub(crate) fn vector(cx: &Context, op: &'static str, hosts: &[HostTensor]) -> Result<DeviceBuffer> {
    let mut values = Vec::new();
    for host in hosts {
        match host.dtype() {
            DType::F32 | DType::BF16 | DType::F16 | DType::F64 => values.extend_from_slice(&host.to_f32()?),
            dtype => return Err(Error::DType { op, dtype, backend: cx.name() }),
        }
    }
    upload_floats(cx, &values)
}

pub(crate) fn upload_floats(cx: &Context, values: &[f32]) -> Result<DeviceBuffer> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let buffer = cx.allocate(bytes.len())?;
    cx.check(cx.upload(bytes, buffer.ptr(cx)))?;
    Ok(buffer)
}

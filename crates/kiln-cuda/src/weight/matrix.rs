//! Dense matrices, and small vectors beside them.

use std::sync::OnceLock;

use kiln_ops::{Error, Result};
use kiln_tensor::{DType, HostTensor};

use crate::context::Context;
use crate::ops::elementwise::cast_block;
use crate::queue::Block;
use crate::sys::driver::DevicePtr;

/// A matrix on the device.
pub(crate) struct Matrix {
    pub rows: usize,
    pub cols: usize,
    /// F32, BF16 or F16, as in the file.
    pub stored: DType,
    pub block: Block,
    /// Made when a product first needs them, and kept: making them again would cost more than the product.
    as_f32: OnceLock<Block>,
    as_bf16: OnceLock<Block>,
}

impl Matrix {
    /// Slabs of one width and dtype, below each other: one matrix there, however many they were here.
    pub fn new(cx: &Context, op: &'static str, slabs: &[HostTensor], cols: usize) -> Result<Matrix> {
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
        let mut at = block.at(cx);
        for slab in &hosts {
            cx.done(cx.upload(slab.bytes(), at))?;
            at += slab.bytes().len() as u64;
        }
        Ok(Matrix::of(rows, cols, stored, block))
    }

    pub fn of(rows: usize, cols: usize, stored: DType, block: Block) -> Matrix {
        let (as_f32, as_bf16) = (OnceLock::new(), OnceLock::new());
        Matrix { rows, cols, stored, block, as_f32, as_bf16 }
    }

    /// Address of row `row` from column `column` on, as it is stored.
    pub fn stored_at(&self, cx: &Context, row: usize, column: usize) -> DevicePtr {
        self.block.at(cx) + ((row * self.cols + column) * self.stored.size()) as u64
    }

    /// The same, as f32 or bf16.
    pub fn at(&self, cx: &Context, dtype: DType, row: usize, column: usize) -> Result<DevicePtr> {
        if dtype == self.stored {
            return Ok(self.stored_at(cx, row, column));
        }
        let form = if dtype == DType::BF16 { &self.as_bf16 } else { &self.as_f32 };
        let block = match form.get() {
            Some(block) => block.clone(),
            None => {
                // Kept, so it is not to be what only a recording writes.
                cx.done(cx.device("cuLaunchKernel"))?;
                let block = cx.block(self.rows * self.cols * dtype.size())?;
                cast_block(cx, self.stored, self.block.at(cx), dtype, block.at(cx), self.rows * self.cols)?;
                // Of two threads that come here at once one is second, and its copy is as good.
                form.get_or_init(|| block).clone()
            }
        };
        Ok(block.at(cx) + ((row * self.cols + column) * dtype.size()) as u64)
    }
}

/// Small f32 vectors, one after the other: a bias, the scales of rows.
pub(crate) fn vector(cx: &Context, op: &'static str, hosts: &[HostTensor]) -> Result<Block> {
    let mut values = Vec::new();
    for host in hosts {
        match host.dtype() {
            DType::F32 | DType::BF16 | DType::F16 | DType::F64 => values.extend_from_slice(&host.to_f32()?),
            dtype => return Err(Error::DType { op, dtype, backend: cx.name() }),
        }
    }
    upload_floats(cx, &values)
}

pub(crate) fn upload_floats(cx: &Context, values: &[f32]) -> Result<Block> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let block = cx.block(bytes.len())?;
    cx.done(cx.upload(bytes, block.at(cx)))?;
    Ok(block)
}

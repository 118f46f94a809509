use std::sync::Arc;

use kiln_ops::{Error, Result, Tensor};
use kiln_tensor::{DType, HostTensor, Shape};

use crate::Context;
use crate::device::Block;
use crate::sys::driver::DevicePtr;

/// A tensor in a GPU's memory: f32 or bf16, row-major, shared and immutable.
#[derive(Clone)]
pub struct CudaTensor {
    block: Arc<Block>,
    /// Bytes from the block's beginning.
    start: usize,
    shape: Shape,
    dtype: DType,
}

impl Tensor for CudaTensor {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}

impl CudaTensor {
    /// A tensor to be written; what is in it before is left from earlier work.
    pub(crate) fn new(cx: &Context, shape: impl Into<Shape>, dtype: DType) -> Result<CudaTensor> {
        let shape = shape.into();
        let bytes = shape.checked_numel().and_then(|n| n.checked_mul(dtype.size()));
        let bytes = bytes.ok_or_else(|| Error::Memory { backend: cx.name(), bytes: usize::MAX })?;
        let block = Arc::new(cx.block(bytes)?);
        Ok(CudaTensor { block, start: 0, shape, dtype })
    }

    /// Address of the first element.
    pub(crate) fn at(&self) -> DevicePtr {
        self.block.at() + self.start as u64
    }

    /// Address of row `row`.
    pub(crate) fn row_at(&self, row: usize) -> DevicePtr {
        let rows = self.shape.rows().max(1);
        self.at() + (row * (self.shape.numel() / rows) * self.dtype.size()) as u64
    }

    /// The same memory from element `start` on (counted from this tensor's first) under another shape.
    pub(crate) fn view(&self, start: usize, shape: Shape) -> CudaTensor {
        debug_assert!(start + shape.numel() <= self.shape.numel());
        CudaTensor { start: self.start + start * self.dtype.size(), shape, ..self.clone() }
    }

    pub(crate) fn from_host(cx: &Context, host: &HostTensor, dtype: DType) -> Result<CudaTensor> {
        let tensor = CudaTensor::new(cx, host.shape(), dtype)?;
        let host = host.to_dtype(dtype)?;
        cx.done(cx.device.upload(host.bytes(), tensor.at()))?;
        Ok(tensor)
    }

    pub(crate) fn to_host(&self, cx: &Context) -> Result<HostTensor> {
        let mut bytes = vec![0u8; self.shape.numel() * self.dtype.size()];
        cx.done(cx.device.download(self.at(), &mut bytes))?;
        Ok(HostTensor::new(self.dtype, &self.shape, bytes.into())?)
    }
}

impl std::fmt::Debug for CudaTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaTensor({}, {})", self.dtype, self.shape)
    }
}

use kiln_ops::{Error, Later, Result, Tensor};
use kiln_tensor::{DType, HostTensor, Shape};

use crate::context::Context;
use crate::queue::{Block, BlockName};
use crate::sys::driver::DevicePtr;

/// A tensor in a GPU's memory: f32 or bf16, row-major, shared and immutable.
#[derive(Clone)]
pub struct CudaTensor {
    block: Block,
    /// Bytes from the block's beginning.
    start: usize,
    shape: Shape,
    dtype: DType,
}

/// Which tensor it was.
pub(crate) struct Named {
    block: BlockName,
    start: usize,
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
        let block = cx.block(bytes)?;
        Ok(CudaTensor { block, start: 0, shape, dtype })
    }

    /// Address of the first element, for work of this context.
    pub(crate) fn at(&self, cx: &Context) -> DevicePtr {
        self.block.at(cx) + self.start as u64
    }

    /// The address of the block that it is a part of.
    pub(crate) fn block_at(&self, cx: &Context) -> DevicePtr {
        self.block.at(cx)
    }

    /// Whether the first element's address is a multiple of 16.
    pub(crate) fn is_aligned(&self) -> bool {
        self.block.is_aligned(self.start)
    }

    /// Address of row `row`.
    pub(crate) fn row_at(&self, cx: &Context, row: usize) -> DevicePtr {
        let rows = self.shape.rows().max(1);
        self.at(cx) + (row * (self.shape.numel() / rows) * self.dtype.size()) as u64
    }

    /// The same memory from element `start` on (counted from this tensor's first) under another shape.
    pub(crate) fn view(&self, start: usize, shape: Shape) -> CudaTensor {
        debug_assert!(start + shape.numel() <= self.shape.numel());
        CudaTensor { start: self.start + start * self.dtype.size(), shape, ..self.clone() }
    }

    /// Whether this is the very tensor that was named; what is in a tensor never changes.
    pub(crate) fn is(&self, named: &Named) -> bool {
        self.start == named.start && self.block.is(&named.block)
    }

    /// A name for this tensor, which doesn't keep it.
    pub(crate) fn named(&self) -> Named {
        Named { block: self.block.name(), start: self.start }
    }

    pub(crate) fn from_host(cx: &Context, host: &HostTensor, dtype: DType) -> Result<CudaTensor> {
        let tensor = CudaTensor::new(cx, host.shape(), dtype)?;
        let host = host.to_dtype(dtype)?;
        cx.done(cx.upload(host.bytes(), tensor.at(cx)))?;
        Ok(tensor)
    }

    pub(crate) fn to_host(&self, cx: &Context) -> Result<HostTensor> {
        let mut bytes = vec![0u8; self.shape.numel() * self.dtype.size()];
        cx.done(cx.download(self.at(cx), &mut bytes))?;
        Ok(HostTensor::new(self.dtype, &self.shape, bytes.into())?)
    }

    pub(crate) fn to_host_later(&self, cx: &Context) -> Result<Later<HostTensor>> {
        let bytes = self.shape.numel() * self.dtype.size();
        let arrival = cx.done(cx.download_later(self.at(cx), bytes))?;
        let (cx, dtype, shape) = (cx.clone(), self.dtype, self.shape.clone());
        Ok(Box::new(move || Ok(HostTensor::new(dtype, &shape, cx.done(arrival.wait())?.into())?)))
    }
}

impl std::fmt::Debug for CudaTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaTensor({}, {})", self.dtype, self.shape)
    }
}

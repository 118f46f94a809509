//! Tensors in GPU memory.

use kiln_ops::{Error, Result, Tensor};
use kiln_tensor::{DType, Shape};

use crate::context::Context;
use crate::queue::{BufferId, DeviceBuffer};
use crate::sys::driver::DevicePtr;

/// A tensor in GPU memory: f32 or bf16, row-major; shared ones are immutable.
#[derive(Clone)]
pub struct CudaTensor {
    buffer: DeviceBuffer,
    /// Offset in the buffer, in bytes.
    start: usize,
    shape: Shape,
    dtype: DType,
    moments: Option<Moments>,
}

/// Moments of an image's values, which a convolution computes along with them, for group norms.
///
/// `[blocks, channels / Moments::CHANNELS]`, each count, mean and sum of squared deviations.
#[derive(Clone)]
pub(crate) struct Moments {
    pub buffer: DeviceBuffer,
    pub blocks: usize,
}

impl Moments {
    /// Channels whose values have common moments, as in `conv_hopper.cu`.
    pub const CHANNELS: usize = 4;

    pub fn new(cx: &Context, blocks: usize, channels: usize) -> Result<Moments> {
        Ok(Moments { buffer: cx.allocate(blocks * (channels / Moments::CHANNELS) * 3 * 4)?, blocks })
    }
}

/// Identity of a tensor; does not keep it alive.
pub(crate) struct TensorId {
    buffer: BufferId,
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
    /// Allocates an uninitialised tensor.
    pub(crate) fn new(cx: &Context, shape: impl Into<Shape>, dtype: DType) -> Result<CudaTensor> {
        let shape = shape.into();
        let bytes = shape.checked_numel().and_then(|n| n.checked_mul(dtype.size()));
        let bytes = bytes.ok_or_else(|| Error::Memory { backend: cx.name(), bytes: usize::MAX })?;
        let buffer = cx.allocate(bytes)?;
        Ok(CudaTensor { buffer, start: 0, shape, dtype, moments: None })
    }

    /// Address of the first element, for work in this context.
    pub(crate) fn ptr(&self, cx: &Context) -> DevicePtr {
        self.buffer.ptr(cx) + self.start as u64
    }

    /// Address of the buffer that contains it.
    pub(crate) fn buffer_ptr(&self, cx: &Context) -> DevicePtr {
        self.buffer.ptr(cx)
    }

    /// Whether the first element is aligned to 16 bytes.
    pub(crate) fn is_aligned(&self) -> bool {
        self.buffer.is_aligned(self.start)
    }

    /// Whether nothing else refers to its memory, which may then be changed.
    pub(crate) fn is_unique(&mut self) -> bool {
        self.moments = None;
        self.buffer.is_unique()
    }

    /// Address of row `row`.
    pub(crate) fn row_ptr(&self, cx: &Context, row: usize) -> DevicePtr {
        let rows = self.shape.rows().max(1);
        self.ptr(cx) + (row * (self.shape.numel() / rows) * self.dtype.size()) as u64
    }

    /// Returns a view that starts `start` elements into this tensor.
    pub(crate) fn view(&self, start: usize, shape: Shape) -> CudaTensor {
        debug_assert!(start + shape.numel() <= self.shape.numel());
        CudaTensor { start: self.start + start * self.dtype.size(), shape, moments: None, ..self.clone() }
    }

    /// The tensor with the moments of its values.
    pub(crate) fn with_moments(self, moments: Option<Moments>) -> CudaTensor {
        CudaTensor { moments, ..self }
    }

    /// Moments of its values, if they are known.
    pub(crate) fn moments(&self) -> Option<&Moments> {
        self.moments.as_ref()
    }

    /// Whether this is the tensor with that identity, and so with the same content.
    pub(crate) fn has_id(&self, id: &TensorId) -> bool {
        self.start == id.start && self.buffer.has_id(&id.buffer)
    }

    /// The tensor's identity.
    pub(crate) fn id(&self) -> TensorId {
        TensorId { buffer: self.buffer.id(), start: self.start }
    }
}

impl std::fmt::Debug for CudaTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaTensor({}, {})", self.dtype, self.shape)
    }
}

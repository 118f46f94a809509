//! Tensors in GPU memory.

use std::ops::Range;

use kiln_ops::{Result, Tensor};
use kiln_tensor::{DType, Shape};

use crate::context::{Context, Window};
use crate::device::DeviceBuffer;
use crate::kernels::{Value, Word};

/// A tensor in GPU memory: f32 or bf16, row-major; shared ones are immutable.
#[derive(Clone)]
pub struct WgpuTensor {
    buffer: DeviceBuffer,
    /// The first element.
    start: usize,
    shape: Shape,
    dtype: DType,
}

impl Tensor for WgpuTensor {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}

impl WgpuTensor {
    /// Allocates a tensor with arbitrary content.
    pub(crate) fn new(cx: &Context, shape: impl Into<Shape>, dtype: DType) -> Result<WgpuTensor> {
        let shape = shape.into();
        let bytes = shape.checked_numel().and_then(|n| n.checked_mul(dtype.size()));
        let bytes = bytes.ok_or_else(|| cx.out_of_memory(usize::MAX))?;
        Ok(WgpuTensor { buffer: cx.allocate(bytes)?, start: 0, shape, dtype })
    }

    /// The element type as a kernel's constant.
    pub(crate) fn element(&self) -> Value {
        Word(self.dtype.name())
    }

    pub(crate) fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// The first element's position in the buffer, in bytes.
    pub(crate) fn start_bytes(&self) -> usize {
        self.start * self.dtype.size()
    }

    /// Whether nothing else refers to its memory, which may then be changed.
    pub(crate) fn is_unique(&mut self) -> bool {
        self.buffer.is_unique()
    }

    /// A view that starts `start` elements into this tensor.
    pub(crate) fn view(&self, start: usize, shape: impl Into<Shape>) -> WgpuTensor {
        WgpuTensor { start: self.start + start, shape: shape.into(), ..self.clone() }
    }

    /// The whole tensor, for a kernel.
    pub(crate) fn window(&self) -> Window<'_> {
        self.elements(0..self.shape.numel())
    }

    /// Some elements, for a kernel that counts from their first.
    pub(crate) fn elements(&self, range: Range<usize>) -> Window<'_> {
        let size = self.dtype.size();
        Window {
            buffer: &self.buffer,
            start: (self.start + range.start) * size,
            bytes: range.len() * size,
            element: size,
        }
    }

    /// Some rows of `width` elements, for a kernel that counts from their first.
    pub(crate) fn rows(&self, rows: &Range<usize>, width: usize) -> Window<'_> {
        self.elements(rows.start * width..rows.end * width)
    }
}

impl std::fmt::Debug for WgpuTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WgpuTensor({}, {})", self.dtype, self.shape)
    }
}

//! Tensors in host memory.

use std::sync::Arc;

use kiln_ops::Tensor;
use kiln_tensor::{DType, Shape, bf16};

use crate::buffer::Buffer;
use crate::element::Element;

/// A tensor in host memory: f32 or bf16, row-major; shared ones are immutable.
#[derive(Clone)]
pub struct CpuTensor {
    data: Data,
    start: usize,
    shape: Shape,
}

#[derive(Clone)]
enum Data {
    F32(Arc<Buffer<f32>>),
    BF16(Arc<Buffer<bf16>>),
}

impl Tensor for CpuTensor {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn dtype(&self) -> DType {
        match self.data {
            Data::F32(_) => DType::F32,
            Data::BF16(_) => DType::BF16,
        }
    }
}

/// A number format that a [`CpuTensor`] can hold.
pub(crate) trait TensorElement: Element {
    /// A tensor of these elements.
    fn into_tensor(buffer: Buffer<Self>, shape: Shape) -> CpuTensor;
    /// The elements of a tensor that has this dtype, as the caller has checked.
    fn elements(x: &CpuTensor) -> &[Self];
    /// The same, to be changed; `None` if other tensors share their memory.
    fn elements_mut(x: &mut CpuTensor) -> Option<&mut [Self]>;
}

/// Runs an expression with `T` standing for the element type of `$x`.
macro_rules! by_dtype {
    ($x:expr, $T:ident => $body:expr) => {
        match kiln_ops::Tensor::dtype($x) {
            kiln_tensor::DType::BF16 => {
                type $T = kiln_tensor::bf16;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}
pub(crate) use by_dtype;

macro_rules! tensor_element {
    ($T:ty, $Variant:ident) => {
        impl TensorElement for $T {
            fn into_tensor(buffer: Buffer<$T>, shape: Shape) -> CpuTensor {
                debug_assert_eq!(buffer.len(), shape.numel());
                CpuTensor { data: Data::$Variant(Arc::new(buffer)), start: 0, shape }
            }

            fn elements(x: &CpuTensor) -> &[$T] {
                match &x.data {
                    Data::$Variant(buffer) => &buffer[x.start..][..x.shape.numel()],
                    _ => unreachable!("the arguments were checked to be {}", <$T as Element>::DTYPE),
                }
            }

            fn elements_mut(x: &mut CpuTensor) -> Option<&mut [$T]> {
                match &mut x.data {
                    Data::$Variant(buffer) => Some(&mut Arc::get_mut(buffer)?[x.start..][..x.shape.numel()]),
                    _ => None,
                }
            }
        }
    };
}
tensor_element!(f32, F32);
tensor_element!(bf16, BF16);

impl CpuTensor {
    /// A view of the same memory from this tensor's element `start` on, with another shape.
    pub(crate) fn view(&self, start: usize, shape: Shape) -> CpuTensor {
        debug_assert!(start + shape.numel() <= self.shape.numel());
        CpuTensor { data: self.data.clone(), start: self.start + start, shape }
    }
}

impl std::fmt::Debug for CpuTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuTensor({}, {})", self.dtype(), self.shape)
    }
}

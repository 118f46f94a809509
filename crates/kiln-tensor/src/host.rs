//! Tensors in host memory.

use std::borrow::Cow;
use std::ops::Range;

use bytemuck::Pod;
use bytes::Bytes;
use half::{bf16, f16};

use crate::packed::small_floats::{from_e4m3, from_e5m2};
use crate::{DType, Error, Result, Shape};

/// A row-major tensor in host memory.
///
/// The bytes are shared and immutable: cloning, reshaping and slicing rows copy nothing, and a tensor read from a
/// weight file stays a view of the memory map. Values are little-endian, as in the files.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    dtype: DType,
    shape: Shape,
    data: Bytes,
}

impl HostTensor {
    /// Creates a tensor from `data`, which must have exactly the bytes that shape and dtype need.
    pub fn new(dtype: DType, shape: impl Into<Shape>, data: Bytes) -> Result<Self> {
        let shape = shape.into();
        let expected = shape
            .checked_numel()
            .and_then(|n| n.checked_mul(dtype.size()))
            .ok_or_else(|| Error::TooLarge(shape.clone()))?;
        if data.len() != expected {
            return Err(Error::Length { shape, dtype, expected, found: data.len() });
        }
        Ok(HostTensor { dtype, shape, data })
    }

    /// Creates an f32 tensor from `values` without a copy.
    pub fn from_f32(shape: impl Into<Shape>, values: Vec<f32>) -> Result<Self> {
        HostTensor::new(DType::F32, shape, into_bytes(values))
    }

    /// Creates a bf16 tensor from `values` without a copy.
    pub fn from_bf16(shape: impl Into<Shape>, values: Vec<bf16>) -> Result<Self> {
        HostTensor::new(DType::BF16, shape, into_bytes(values))
    }

    /// Creates an f32 tensor of zeros.
    pub fn zeros(shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        let data = into_bytes(vec![0f32; shape.numel()]);
        HostTensor { dtype: DType::F32, shape, data }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The raw bytes, shared.
    pub fn bytes(&self) -> &Bytes {
        &self.data
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The elements as f32: borrowed if they are stored as aligned f32, otherwise converted from any float type.
    pub fn to_f32(&self) -> Result<Cow<'_, [f32]>> {
        Ok(match self.dtype {
            DType::F32 => typed::<f32>(&self.data),
            DType::BF16 => self.convert(|v: bf16| v.to_f32()),
            DType::F16 => self.convert(|v: f16| v.to_f32()),
            DType::F64 => self.convert(|v: f64| v as f32),
            DType::F8E4M3 => self.convert(from_e4m3),
            DType::F8E5M2 => self.convert(from_e5m2),
            from => return Err(Error::Conversion { from, to: DType::F32 }),
        })
    }

    /// Whether no element is NaN or infinite. Integers are finite.
    pub fn is_finite(&self) -> bool {
        match self.dtype {
            DType::BF16 => typed::<bf16>(&self.data).iter().all(|v| v.is_finite()),
            dtype if dtype.is_fp8() || matches!(dtype, DType::F32 | DType::F16 | DType::F64) => {
                self.to_f32().is_ok_and(|values| values.iter().all(|v| v.is_finite()))
            }
            _ => true,
        }
    }

    /// The elements as bf16: borrowed if they are stored as aligned bf16, otherwise rounded from any float type.
    pub fn to_bf16(&self) -> Result<Cow<'_, [bf16]>> {
        Ok(match self.dtype {
            DType::BF16 => typed::<bf16>(&self.data),
            DType::F32 => self.convert(bf16::from_f32),
            DType::F16 => self.convert(|v: f16| bf16::from_f32(v.to_f32())),
            DType::F64 => self.convert(bf16::from_f64),
            DType::F8E4M3 => self.convert(|v: u8| bf16::from_f32(from_e4m3(v))),
            DType::F8E5M2 => self.convert(|v: u8| bf16::from_f32(from_e5m2(v))),
            from => return Err(Error::Conversion { from, to: DType::BF16 }),
        })
    }

    /// The elements of an integer tensor.
    pub fn to_i64(&self) -> Result<Vec<i64>> {
        Ok(match self.dtype {
            DType::I64 => typed::<i64>(&self.data).into_owned(),
            DType::I32 => typed::<i32>(&self.data).iter().map(|&v| v.into()).collect(),
            DType::U8 | DType::Bool => self.data.iter().map(|&v| v.into()).collect(),
            from => return Err(Error::Conversion { from, to: DType::I64 }),
        })
    }

    /// Converts to f32 or bf16; shares the bytes if the tensor already has that type.
    pub fn to_dtype(&self, dtype: DType) -> Result<HostTensor> {
        match dtype {
            _ if dtype == self.dtype => Ok(self.clone()),
            DType::F32 => HostTensor::from_f32(&self.shape, self.to_f32()?.into_owned()),
            DType::BF16 => HostTensor::from_bf16(&self.shape, self.to_bf16()?.into_owned()),
            to => Err(Error::Conversion { from: self.dtype, to }),
        }
    }

    /// The same bytes with another shape of as many elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<HostTensor> {
        let to = shape.into();
        if to.checked_numel() != Some(self.numel()) {
            return Err(Error::Reshape { from: self.shape.clone(), to });
        }
        Ok(HostTensor { dtype: self.dtype, shape: to, data: self.data.clone() })
    }

    /// Slices the first dimension, sharing the bytes.
    pub fn rows(&self, range: Range<usize>) -> Result<HostTensor> {
        let dims = self.shape.dims();
        let outside = || Error::Rows { start: range.start, end: range.end, shape: self.shape.clone() };
        let (&count, inner) = dims.split_first().ok_or_else(outside)?;
        if range.start > range.end || range.end > count {
            return Err(outside());
        }
        let stride = inner.iter().product::<usize>() * self.dtype.size();
        let mut shape = dims.to_vec();
        shape[0] = range.len();
        let data = self.data.slice(range.start * stride..range.end * stride);
        Ok(HostTensor { dtype: self.dtype, shape: shape.into(), data })
    }

    fn convert<S: Pod, D: Clone>(&self, f: impl Fn(S) -> D) -> Cow<'_, [D]> {
        Cow::Owned(typed::<S>(&self.data).iter().map(|&v| f(v)).collect())
    }
}

/// `data` as elements of `T`, copied only if the bytes are not aligned for `T`: files may put tensors at any offset.
fn typed<T: Pod>(data: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(data) {
        Ok(slice) => Cow::Borrowed(slice),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(data)),
    }
}

/// Keeps a typed vector alive as the owner of [`Bytes`].
struct Owner<T>(Vec<T>);

impl<T: Pod> AsRef<[u8]> for Owner<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

fn into_bytes<T: Pod + Send>(values: Vec<T>) -> Bytes {
    Bytes::from_owner(Owner(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_must_fit_the_shape() {
        let e = HostTensor::new(DType::F32, [2, 2], Bytes::from_static(&[0; 15])).unwrap_err();
        assert_eq!(e.to_string(), "shape [2, 2] of f32 needs 16 bytes, found 15");
        assert!(HostTensor::new(DType::F32, [usize::MAX, 2], Bytes::new()).is_err());
    }

    #[test]
    fn unaligned_bytes_read_the_same_values() {
        let bytes: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        for lead in 0..4 {
            let mut shifted = vec![0u8; lead];
            shifted.extend(&bytes);
            let t = HostTensor::new(DType::F32, [2], Bytes::from(shifted).slice(lead..)).unwrap();
            assert_eq!(t.to_f32().unwrap().as_ref(), [1.5, -2.0]);
        }
    }

    #[test]
    fn rows_share_the_bytes() {
        let t = HostTensor::from_f32([3, 2], (0..6).map(|v| v as f32).collect()).unwrap();
        let r = t.rows(1..3).unwrap();
        assert_eq!(r.to_f32().unwrap().as_ref(), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(r.bytes().as_ptr(), t.bytes()[8..].as_ptr());
        assert!(t.rows(2..4).is_err());
        assert!(t.reshape([4]).is_err());
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        let t = HostTensor::from_f32([2], vec![1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0]).unwrap();
        let b = t.to_dtype(DType::BF16).unwrap();
        assert_eq!(b.to_f32().unwrap().as_ref(), [1.0, 1.0 + 4.0 / 256.0]);
    }
}

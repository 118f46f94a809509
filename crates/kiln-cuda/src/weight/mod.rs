//! Weights of linear layers: dense, int8, fp8, nvfp4 or packed; resident on the GPU or streamed from the host.

mod conv;
mod matrix;
mod nvfp4;
mod packed;
mod quantized;

use std::ops::Deref;
use std::sync::Arc;

use kiln_ops::{Residency, Result, shapes};
use kiln_tensor::packed::PackedTensor;
use kiln_tensor::{DType, HostLinear, HostTensor, LinearWeight, LoraDelta};

use crate::context::Context;
use crate::queue::DeviceBuffer;
use crate::streamer::{ResidentWeight, StreamedWeight};
use crate::sys::driver::DevicePtr;
pub use conv::CudaConv;
pub(crate) use conv::load_conv;
pub(crate) use matrix::Matrix;
use matrix::vector;
pub(crate) use nvfp4::Nvfp4Matrix;
use packed::PackedMatrix;
pub(crate) use quantized::QuantizedMatrix;

/// A linear layer on the device.
#[derive(Clone)]
pub struct CudaWeight {
    /// Shared by copies of the layer with other LoRA updates.
    storage: Arc<Storage>,
    pub(crate) bias: Option<DeviceBuffer>,
    pub(crate) deltas: Arc<[LowRankUpdate]>,
}

/// The matrix an input is multiplied with.
pub(crate) enum WeightMatrix {
    Dense(Matrix),
    Int8(QuantizedMatrix),
    Fp8(QuantizedMatrix),
    Nvfp4(Nvfp4Matrix),
}

/// The form in which a weight is stored between uses.
enum StoredMatrix {
    /// Multiplied as stored.
    Ready(WeightMatrix),
    /// Dequantized for every use.
    Packed(PackedMatrix),
}

impl StoredMatrix {
    fn new(cx: &Context, linear: &HostLinear) -> Result<StoredMatrix> {
        let size @ [_, cols] = [linear.rows(), linear.cols()];
        Ok(StoredMatrix::Ready(match linear.weight() {
            LinearWeight::Int8 { rows, scales, rotation } => {
                WeightMatrix::Int8(QuantizedMatrix::from_int8(cx, rows, scales, *rotation, size)?)
            }
            LinearWeight::Packed(packed) if linear.nvfp4_matmul() => {
                WeightMatrix::Nvfp4(Nvfp4Matrix::new(cx, packed, size)?)
            }
            LinearWeight::Packed(packed) => {
                return StoredMatrix::packed(cx, packed, linear.fp8_matmul(), size);
            }
            LinearWeight::Dense(matrices) if linear.fp8_matmul() => {
                WeightMatrix::Fp8(QuantizedMatrix::quantize_fp8(cx, matrices, size)?)
            }
            LinearWeight::Dense(matrices) => WeightMatrix::Dense(Matrix::new(cx, "weight", matrices, cols)?),
        }))
    }

    /// Keeps packed weights packed, unless no kernel reads that form.
    fn packed(
        cx: &Context,
        packed: &[PackedTensor],
        fp8: bool,
        size @ [_, cols]: [usize; 2],
    ) -> Result<StoredMatrix> {
        let matrix = if fp8 && packed.iter().all(PackedTensor::is_fp8) {
            WeightMatrix::Fp8(QuantizedMatrix::from_fp8(cx, packed, size)?)
        } else if fp8 {
            // Round once, not through bf16.
            let matrices = packed.iter().map(PackedTensor::to_f32).collect::<Result<Vec<_>, _>>()?;
            WeightMatrix::Fp8(QuantizedMatrix::quantize_fp8(cx, &matrices, size)?)
        } else if packed.iter().any(PackedTensor::is_patched) {
            // Only the CPU can apply patches to packed values.
            WeightMatrix::Dense(Matrix::new(cx, "weight", &unpack_to_one_dtype(packed)?, cols)?)
        } else {
            return Ok(StoredMatrix::Packed(PackedMatrix::new(cx, packed, size)?));
        };
        Ok(StoredMatrix::Ready(matrix))
    }

    fn size(&self) -> [usize; 2] {
        match self {
            StoredMatrix::Ready(WeightMatrix::Dense(matrix)) => [matrix.rows, matrix.cols],
            StoredMatrix::Ready(WeightMatrix::Int8(bytes) | WeightMatrix::Fp8(bytes)) => {
                [bytes.rows, bytes.cols]
            }
            StoredMatrix::Ready(WeightMatrix::Nvfp4(matrix)) => [matrix.rows, matrix.cols],
            StoredMatrix::Packed(packed) => [packed.rows, packed.cols],
        }
    }

    /// Address and size of the values, without scales.
    fn payload(&self, cx: &Context) -> (DevicePtr, usize) {
        match self {
            StoredMatrix::Ready(WeightMatrix::Dense(m)) => {
                (m.buffer.ptr(cx), m.rows * m.cols * m.stored.size())
            }
            StoredMatrix::Ready(WeightMatrix::Int8(bytes) | WeightMatrix::Fp8(bytes)) => bytes.payload(cx),
            StoredMatrix::Ready(WeightMatrix::Nvfp4(matrix)) => matrix.payload(cx),
            StoredMatrix::Packed(packed) => packed.payload(cx),
        }
    }

    /// Returns the same matrix with its values in another buffer.
    fn with_buffer(&self, buffer: DeviceBuffer) -> StoredMatrix {
        match self {
            StoredMatrix::Ready(matrix) => StoredMatrix::Ready(match matrix {
                WeightMatrix::Dense(m) => {
                    WeightMatrix::Dense(Matrix::from_buffer(m.rows, m.cols, m.stored, buffer))
                }
                WeightMatrix::Int8(rows) => WeightMatrix::Int8(rows.with_buffer(buffer)),
                WeightMatrix::Fp8(rows) => WeightMatrix::Fp8(rows.with_buffer(buffer)),
                WeightMatrix::Nvfp4(matrix) => WeightMatrix::Nvfp4(matrix.with_buffer(buffer)),
            }),
            StoredMatrix::Packed(packed) => StoredMatrix::Packed(packed.with_buffer(buffer)),
        }
    }
}

/// Dequantizes a packed matrix to the dtype of its input.
fn dequantize(cx: &Context, packed: &PackedMatrix, dtype: DType) -> Result<WeightMatrix> {
    Ok(WeightMatrix::Dense(Matrix::from_buffer(
        packed.rows,
        packed.cols,
        dtype,
        packed.dequantize(cx, dtype)?,
    )))
}

/// Where a weight is stored between uses.
enum Storage {
    /// On the device.
    Device(StoredMatrix),
    /// Values in host memory; scales stay on the device.
    Host(StoredMatrix, StreamedWeight),
}

/// A weight matrix that is on the device while this lives.
pub(crate) enum LoadedWeight<'a> {
    Resident(&'a WeightMatrix),
    Temporary {
        matrix: WeightMatrix,
        /// Protects the streamed weight from eviction.
        _resident: Option<ResidentWeight<'a>>,
    },
}

impl Deref for LoadedWeight<'_> {
    type Target = WeightMatrix;

    fn deref(&self) -> &WeightMatrix {
        match self {
            LoadedWeight::Resident(matrix) => matrix,
            LoadedWeight::Temporary { matrix, .. } => matrix,
        }
    }
}

/// A LoRA update of the outputs from `row` on.
pub(crate) struct LowRankUpdate {
    pub row: usize,
    pub down: Matrix,
    pub up: Matrix,
    pub scale: f32,
}

impl LowRankUpdate {
    /// Uploads the updates of a layer with `cols` columns; those of rank 0 are dropped.
    fn all(cx: &Context, deltas: &[LoraDelta], cols: usize) -> Result<Arc<[LowRankUpdate]>> {
        let low_rank = |delta: &LoraDelta| {
            Ok(LowRankUpdate {
                row: delta.row,
                down: Matrix::new(cx, "weight", std::slice::from_ref(&delta.down), cols)?,
                up: Matrix::new(cx, "weight", std::slice::from_ref(&delta.up), delta.rank())?,
                scale: delta.scale,
            })
        };
        deltas.iter().filter(|delta| delta.rank() > 0 && delta.rows() > 0).map(low_rank).collect()
    }
}

pub(crate) fn load_weight(cx: &Context, linear: HostLinear, residency: Residency) -> Result<CudaWeight> {
    let stored = StoredMatrix::new(cx, &linear)?;
    let bias = linear.bias().map(|bias| vector(cx, "weight", std::slice::from_ref(bias))).transpose()?;
    let deltas = LowRankUpdate::all(cx, linear.deltas(), linear.cols())?;
    let (at, bytes) = stored.payload(cx);
    let storage = match residency {
        Residency::Device => Storage::Device(stored),
        Residency::Host => {
            let streamed = cx.check(cx.shared().streamer.add(at, bytes))?;
            Storage::Host(stored.with_buffer(DeviceBuffer::borrowed(0)), streamed)
        }
    };
    Ok(CudaWeight { storage: Arc::new(storage), bias, deltas })
}

pub(crate) fn with_deltas(cx: &Context, w: &CudaWeight, deltas: Vec<LoraDelta>) -> Result<CudaWeight> {
    let size @ [_, cols] = w.size();
    shapes::with_deltas(&deltas, size)?;
    let deltas = LowRankUpdate::all(cx, &deltas, cols)?;
    Ok(CudaWeight { storage: w.storage.clone(), bias: w.bias.clone(), deltas })
}

impl CudaWeight {
    pub(crate) fn size(&self) -> [usize; 2] {
        match &*self.storage {
            Storage::Device(stored) | Storage::Host(stored, _) => stored.size(),
        }
    }

    /// Returns the matrix for an input of this dtype: copied to the device if streamed, dequantized if packed.
    pub(crate) fn load(&self, cx: &Context, dtype: DType) -> Result<LoadedWeight<'_>> {
        match &*self.storage {
            Storage::Device(StoredMatrix::Ready(matrix)) => Ok(LoadedWeight::Resident(matrix)),
            Storage::Device(StoredMatrix::Packed(packed)) => {
                Ok(LoadedWeight::Temporary { matrix: dequantize(cx, packed, dtype)?, _resident: None })
            }
            Storage::Host(stored, streamed) => {
                let resident = cx.check(streamed.acquire(cx))?;
                let resident = resident.ok_or_else(|| cx.out_of_memory(stored.payload(cx).1))?;
                let matrix = match stored.with_buffer(DeviceBuffer::borrowed(resident.ptr)) {
                    StoredMatrix::Ready(matrix) => matrix,
                    StoredMatrix::Packed(packed) => dequantize(cx, &packed, dtype)?,
                };
                Ok(LoadedWeight::Temporary { matrix, _resident: Some(resident) })
            }
        }
    }
}

/// Unpacks matrices to bf16, or to f32 if one of them is f32.
fn unpack_to_one_dtype(packed: &[PackedTensor]) -> Result<Vec<HostTensor>> {
    let matrices = packed.iter().map(PackedTensor::to_dense).collect::<Result<Vec<_>, _>>()?;
    if matrices.iter().any(|matrix| matrix.dtype() == DType::F32) {
        Ok(matrices.iter().map(|matrix| matrix.to_dtype(DType::F32)).collect::<Result<_, _>>()?)
    } else {
        Ok(matrices)
    }
}

//! Weights on the device: as they are stored in their file, and in the type a product needs where that differs.

mod conv;
mod matrix;
mod packed;
mod rows;

use std::ops::Deref;
use std::sync::Arc;

use kiln_ops::{Residency, Result, shapes};
use kiln_tensor::packed::Packed;
use kiln_tensor::{DType, Delta, HostTensor, LinearMatrix, LinearParts};

use crate::context::Context;
use crate::queue::Block;
use crate::streamer::{Brought, Streamed};
use crate::sys::driver::DevicePtr;
pub use conv::CudaConv;
pub(crate) use matrix::Matrix;
use matrix::vector;
use packed::PackedMatrix;
pub(crate) use rows::ByteRows;

/// A linear layer on the device.
pub struct CudaWeight {
    /// Shared with the same layer under other updates.
    base: Arc<Place>,
    pub(crate) bias: Option<Block>,
    pub(crate) deltas: Vec<LowRank>,
}

/// What the input is multiplied with.
pub(crate) enum Base {
    Dense(Matrix),
    Int8(ByteRows),
    Fp8(ByteRows),
}

/// What is kept of a weight between its uses.
enum Stored {
    /// Multiplied as it is.
    Ready(Base),
    /// Written out for every use.
    Packed(PackedMatrix),
}

impl Stored {
    fn new(cx: &Context, parts: &LinearParts) -> Result<Stored> {
        let size @ [_, cols] = [parts.rows(), parts.cols()];
        Ok(Stored::Ready(match parts.matrix() {
            LinearMatrix::Int8 { rows, scales } => Base::Int8(ByteRows::integers(cx, rows, scales, size)?),
            LinearMatrix::Packed(packed) => return Stored::packed(cx, packed, parts.fp8(), size),
            LinearMatrix::Dense(slabs) if parts.fp8() => Base::Fp8(ByteRows::rounded(cx, slabs, size)?),
            LinearMatrix::Dense(slabs) => Base::Dense(Matrix::new(cx, "weight", slabs, cols)?),
        }))
    }

    /// Weights that are packed in their file, and stay so unless nothing reads them in that form.
    fn packed(cx: &Context, packed: &[Packed], fp8: bool, size @ [_, cols]: [usize; 2]) -> Result<Stored> {
        let base = if fp8 && packed.iter().all(Packed::is_fp8) {
            Base::Fp8(ByteRows::floats(cx, packed, size)?)
        } else if fp8 {
            // Rounded once, not by way of bf16.
            let slabs = packed.iter().map(Packed::to_f32).collect::<Result<Vec<_>, _>>()?;
            Base::Fp8(ByteRows::rounded(cx, &slabs, size)?)
        } else if packed.iter().any(Packed::is_changed) {
            // What changes values where they are read is known to this machine's processor alone.
            Base::Dense(Matrix::new(cx, "weight", &of_one_dtype(packed)?, cols)?)
        } else {
            return Ok(Stored::Packed(PackedMatrix::new(cx, packed, size)?));
        };
        Ok(Stored::Ready(base))
    }

    fn size(&self) -> [usize; 2] {
        match self {
            Stored::Ready(Base::Dense(matrix)) => [matrix.rows, matrix.cols],
            Stored::Ready(Base::Int8(bytes) | Base::Fp8(bytes)) => [bytes.rows, bytes.cols],
            Stored::Packed(packed) => [packed.rows, packed.cols],
        }
    }

    /// Address and size of what is large in it.
    fn bulk(&self, cx: &Context) -> (DevicePtr, usize) {
        match self {
            Stored::Ready(Base::Dense(m)) => (m.block.at(cx), m.rows * m.cols * m.stored.size()),
            Stored::Ready(Base::Int8(bytes) | Base::Fp8(bytes)) => bytes.bulk(cx),
            Stored::Packed(packed) => packed.bulk(cx),
        }
    }

    /// The same with that elsewhere.
    fn moved(&self, block: Block) -> Stored {
        match self {
            Stored::Ready(base) => Stored::Ready(match base {
                Base::Dense(m) => Base::Dense(Matrix::of(m.rows, m.cols, m.stored, block)),
                Base::Int8(rows) => Base::Int8(rows.moved(block)),
                Base::Fp8(rows) => Base::Fp8(rows.moved(block)),
            }),
            Stored::Packed(packed) => Stored::Packed(packed.moved(block)),
        }
    }
}

/// A packed matrix in the type of what it is multiplied with.
fn widened(cx: &Context, packed: &PackedMatrix, dtype: DType) -> Result<Base> {
    Ok(Base::Dense(Matrix::of(packed.rows, packed.cols, dtype, packed.widen(cx, dtype)?)))
}

/// Where a weight lies between its uses.
enum Place {
    /// On the device.
    Here(Stored),
    /// In the host's memory; all but what is large stays.
    There(Stored, Streamed),
}

/// What the input is multiplied with, on the device for as long as this lives.
pub(crate) enum Present<'a> {
    Here(&'a Base),
    Made {
        base: Base,
        /// Whose end lets others take the place of what was brought in.
        _lender: Option<Brought<'a>>,
    },
}

impl Deref for Present<'_> {
    type Target = Base;

    fn deref(&self) -> &Base {
        match self {
            Present::Here(base) => base,
            Present::Made { base, .. } => base,
        }
    }
}

/// A low-rank update of the outputs from `row` on.
pub(crate) struct LowRank {
    pub row: usize,
    pub down: Matrix,
    pub up: Matrix,
    pub scale: f32,
}

impl LowRank {
    /// Updates of a layer with this many columns. A rank of 0 changes nothing.
    fn all(cx: &Context, deltas: &[Delta], cols: usize) -> Result<Vec<LowRank>> {
        let low_rank = |delta: &Delta| {
            Ok(LowRank {
                row: delta.row,
                down: Matrix::new(cx, "weight", std::slice::from_ref(&delta.down), cols)?,
                up: Matrix::new(cx, "weight", std::slice::from_ref(&delta.up), delta.rank())?,
                scale: delta.scale,
            })
        };
        deltas.iter().filter(|delta| delta.rank() > 0 && delta.rows() > 0).map(low_rank).collect()
    }
}

impl CudaWeight {
    pub(crate) fn new(cx: &Context, parts: LinearParts, residency: Residency) -> Result<CudaWeight> {
        let stored = Stored::new(cx, &parts)?;
        let bias = parts.bias().map(|bias| vector(cx, "weight", std::slice::from_ref(bias))).transpose()?;
        let deltas = LowRank::all(cx, parts.deltas(), parts.cols())?;
        let (at, bytes) = stored.bulk(cx);
        let place = match residency {
            Residency::Device => Place::Here(stored),
            Residency::Host => {
                let streamed = cx.done(cx.shared().streamer.add(at, bytes))?;
                Place::There(stored.moved(Block::lent(0)), streamed)
            }
        };
        Ok(CudaWeight { base: Arc::new(place), bias, deltas })
    }

    /// The same layer with other updates.
    pub(crate) fn with_deltas(&self, cx: &Context, deltas: &[Delta]) -> Result<CudaWeight> {
        let size @ [_, cols] = self.size();
        shapes::with_deltas(deltas, size)?;
        let deltas = LowRank::all(cx, deltas, cols)?;
        Ok(CudaWeight { base: self.base.clone(), bias: self.bias.clone(), deltas })
    }

    pub(crate) fn size(&self) -> [usize; 2] {
        match &*self.base {
            Place::Here(stored) | Place::There(stored, _) => stored.size(),
        }
    }

    /// What an input of this type is multiplied with: brought in if it isn't on the device, written out if it is packed.
    pub(crate) fn present(&self, cx: &Context, dtype: DType) -> Result<Present<'_>> {
        match &*self.base {
            Place::Here(Stored::Ready(base)) => Ok(Present::Here(base)),
            Place::Here(Stored::Packed(packed)) => {
                Ok(Present::Made { base: widened(cx, packed, dtype)?, _lender: None })
            }
            Place::There(stored, streamed) => {
                let brought = cx.done(streamed.bring(cx))?;
                let brought = brought.ok_or_else(|| cx.short_of(stored.bulk(cx).1))?;
                let base = match stored.moved(Block::lent(brought.at)) {
                    Stored::Ready(base) => base,
                    Stored::Packed(packed) => widened(cx, &packed, dtype)?,
                };
                Ok(Present::Made { base, _lender: Some(brought) })
            }
        }
    }
}

/// Packed matrices written out: bf16, or f32 where one of them is.
fn of_one_dtype(packed: &[Packed]) -> Result<Vec<HostTensor>> {
    let slabs = packed.iter().map(Packed::to_dense).collect::<Result<Vec<_>, _>>()?;
    match slabs.iter().any(|slab| slab.dtype() == DType::F32) {
        true => Ok(slabs.iter().map(|slab| slab.to_dtype(DType::F32)).collect::<Result<_, _>>()?),
        false => Ok(slabs),
    }
}

//! Weights on the device: as they are stored in their file, and in the type a product needs where that differs.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use kiln_ops::{Error, Result, shapes};
use kiln_tensor::packed::Packed;
use kiln_tensor::{DType, Delta, HostTensor, LinearParts, bf16, f16};

use crate::Context;
use crate::device::Block;
use crate::ops::elementwise::cast_block;
use crate::ops::fp8::round_rows;
use crate::packed::PackedMatrix;
use crate::stream::{Brought, Streamed};
use crate::sys::driver::DevicePtr;

/// A matrix on the device.
pub(crate) struct Matrix {
    pub rows: usize,
    pub cols: usize,
    /// F32, BF16 or F16, as in the file.
    pub stored: DType,
    block: Arc<Block>,
    /// Made when a product first needs them, and kept: making them again would cost more than the product.
    as_f32: OnceLock<Arc<Block>>,
    as_bf16: OnceLock<Arc<Block>>,
}

impl Matrix {
    /// Slabs of one width and dtype, below each other: one matrix there, however many they were here.
    fn new(cx: &Context, op: &'static str, slabs: &[HostTensor], cols: usize) -> Result<Matrix> {
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
        let mut at = block.at();
        for slab in &hosts {
            cx.done(cx.device.upload(slab.bytes(), at))?;
            at += slab.bytes().len() as u64;
        }
        Ok(Matrix::of(rows, cols, stored, block))
    }

    fn of(rows: usize, cols: usize, stored: DType, block: Block) -> Matrix {
        let (as_f32, as_bf16) = (OnceLock::new(), OnceLock::new());
        Matrix { rows, cols, stored, block: Arc::new(block), as_f32, as_bf16 }
    }

    /// Address of row `row` from column `column` on, as it is stored.
    pub fn stored_at(&self, row: usize, column: usize) -> DevicePtr {
        self.block.at() + ((row * self.cols + column) * self.stored.size()) as u64
    }

    /// The same, as f32 or bf16.
    pub fn at(&self, cx: &Context, dtype: DType, row: usize, column: usize) -> Result<DevicePtr> {
        if dtype == self.stored {
            return Ok(self.stored_at(row, column));
        }
        let form = if dtype == DType::BF16 { &self.as_bf16 } else { &self.as_f32 };
        let block = match form.get() {
            Some(block) => Arc::clone(block),
            None => {
                let block = Arc::new(cx.block(self.rows * self.cols * dtype.size())?);
                cast_block(cx, self.stored, self.block.at(), dtype, block.at(), self.rows * self.cols)?;
                // Of two threads that come here at once one is second, and its copy is as good.
                Arc::clone(form.get_or_init(|| block))
            }
        };
        Ok(block.at() + ((row * self.cols + column) * dtype.size()) as u64)
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

/// Small f32 vectors, one after the other: a bias, the scales of rows.
fn vector(cx: &Context, op: &'static str, hosts: &[HostTensor]) -> Result<Block> {
    let mut values = Vec::new();
    for host in hosts {
        match host.dtype() {
            DType::F32 | DType::BF16 | DType::F16 | DType::F64 => values.extend_from_slice(&host.to_f32()?),
            dtype => return Err(Error::DType { op, dtype, backend: cx.name() }),
        }
    }
    upload_floats(cx, &values)
}

fn upload_floats(cx: &Context, values: &[f32]) -> Result<Block> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let block = cx.block(bytes.len())?;
    cx.done(cx.device.upload(bytes, block.at()))?;
    Ok(block)
}

/// Integers with a scale for every row.
pub(crate) struct Int8 {
    pub rows: usize,
    pub cols: usize,
    /// Bytes from row to row: a multiple of 16, zeros after the last column.
    pub depth: usize,
    block: Arc<Block>,
    scales: Arc<Block>,
}

impl Int8 {
    fn new(cx: &Context, parts: &LinearParts, [rows, cols]: [usize; 2]) -> Result<Int8> {
        let depth = padded(cols);
        let block = cx.block(rows * depth)?;
        let mut at = block.at();
        for slab in &parts.slabs {
            let bytes = pad_rows(slab.bytes(), cols, depth);
            cx.done(cx.device.upload(&bytes, at))?;
            at += bytes.len() as u64;
        }
        let scales = Arc::new(vector(cx, "weight", &parts.scales)?);
        Ok(Int8 { rows, cols, depth, block: Arc::new(block), scales })
    }

    /// Address of row `row` and of its scale.
    pub fn at(&self, row: usize) -> [DevicePtr; 2] {
        [self.block.at() + (row * self.depth) as u64, self.scales.at() + 4 * row as u64]
    }
}

/// Bytes of a row of integers, so that rows begin where 16 bytes can be read at once.
pub(crate) fn padded(cols: usize) -> usize {
    cols.next_multiple_of(16)
}

/// Rows of `cols` bytes, `depth` bytes apart.
fn pad_rows(bytes: &[u8], cols: usize, depth: usize) -> Cow<'_, [u8]> {
    if cols == depth {
        return bytes.into();
    }
    let mut out = vec![0; bytes.len() / cols * depth];
    for (row, out) in bytes.chunks_exact(cols).zip(out.chunks_exact_mut(depth)) {
        out[..cols].copy_from_slice(row);
    }
    out.into()
}

/// 8-bit floats with a scale for every row.
pub(crate) struct Fp8 {
    pub rows: usize,
    pub cols: usize,
    /// Bytes from row to row: a multiple of 16, zeros after the last column.
    pub depth: usize,
    block: Arc<Block>,
    scales: Arc<Block>,
}

impl Fp8 {
    fn new(cx: &Context, slabs: &[HostTensor], [rows, cols]: [usize; 2]) -> Result<Fp8> {
        Fp8::check(cx)?;
        let depth = padded(cols);
        let (block, scales) = (Arc::new(cx.block(rows * depth)?), Arc::new(cx.block(rows * 4)?));
        let fp8 = Fp8 { rows, cols, depth, block, scales };
        let mut first = 0;
        for slab in slabs {
            let slab = if slab.dtype() == DType::BF16 { slab.clone() } else { slab.to_dtype(DType::F32)? };
            let block = cx.block(slab.bytes().len())?;
            cx.done(cx.device.upload(slab.bytes(), block.at()))?;
            let height = slab.shape().rows();
            round_rows(cx, slab.dtype(), [block.at(); 2], [cols, 0], height, fp8.at(first), depth)?;
            first += height;
        }
        Ok(fp8)
    }

    /// The bytes of a file with its own scales.
    fn stored(cx: &Context, packed: &[Packed], [rows, cols]: [usize; 2]) -> Result<Fp8> {
        Fp8::check(cx)?;
        let depth = padded(cols);
        let block = cx.block(rows * depth)?;
        let mut at = block.at();
        let mut scales = Vec::with_capacity(rows);
        for matrix in packed {
            let bytes = pad_rows(matrix.bytes(), cols, depth);
            cx.done(cx.device.upload(&bytes, at))?;
            at += bytes.len() as u64;
            scales.extend(matrix.row_scales());
        }
        let scales = upload_floats(cx, &scales)?;
        Ok(Fp8 { rows, cols, depth, block: Arc::new(block), scales: Arc::new(scales) })
    }

    fn check(cx: &Context) -> Result<()> {
        match cx.device.gpu.has_fp8() {
            true => Ok(()),
            false => Err(Error::DType { op: "weight", dtype: DType::F8E4M3, backend: cx.name() }),
        }
    }

    /// Address of row `row` and of its scale.
    pub fn at(&self, row: usize) -> [DevicePtr; 2] {
        [self.block.at() + (row * self.depth) as u64, self.scales.at() + 4 * row as u64]
    }
}

/// A linear layer on the device.
pub struct CudaWeight {
    /// Shared with the same layer under other updates.
    base: Arc<Place>,
    pub(crate) bias: Option<Arc<Block>>,
    pub(crate) deltas: Vec<LowRank>,
}

/// What the input is multiplied with.
pub(crate) enum Base {
    Dense(Matrix),
    Int8(Int8),
    Fp8(Fp8),
    Packed(PackedMatrix),
}

impl Base {
    /// Weights that are packed in their file, and stay so unless nothing reads them in that form.
    fn packed(cx: &Context, parts: &LinearParts, size @ [_, cols]: [usize; 2]) -> Result<Base> {
        if parts.fp8 && parts.packed.iter().all(Packed::is_fp8) {
            return Ok(Base::Fp8(Fp8::stored(cx, &parts.packed, size)?));
        }
        if parts.fp8 {
            // Rounded once, not by way of bf16.
            let slabs = parts.packed.iter().map(Packed::to_f32).collect::<Result<Vec<_>, _>>()?;
            return Ok(Base::Fp8(Fp8::new(cx, &slabs, size)?));
        }
        // What changes values where they are read is known to this machine's processor alone.
        if parts.packed.iter().any(Packed::is_changed) {
            return Ok(Base::Dense(Matrix::new(cx, "weight", &of_one_dtype(&parts.packed)?, cols)?));
        }
        Ok(Base::Packed(PackedMatrix::new(cx, &parts.packed, size)?))
    }

    fn size(&self) -> [usize; 2] {
        match self {
            Base::Dense(matrix) => [matrix.rows, matrix.cols],
            Base::Int8(integers) => [integers.rows, integers.cols],
            Base::Fp8(short) => [short.rows, short.cols],
            Base::Packed(packed) => [packed.rows, packed.cols],
        }
    }

    /// A packed matrix in the type of what it is multiplied with.
    fn widened(cx: &Context, packed: &PackedMatrix, dtype: DType) -> Result<Base> {
        Ok(Base::Dense(Matrix::of(packed.rows, packed.cols, dtype, packed.widen(cx, dtype)?)))
    }

    /// Address and size of what is large in it.
    fn bulk(&self) -> (DevicePtr, usize) {
        match self {
            Base::Dense(m) => (m.block.at(), m.rows * m.cols * m.stored.size()),
            Base::Int8(w) => (w.block.at(), w.rows * w.depth),
            Base::Fp8(w) => (w.block.at(), w.rows * w.depth),
            Base::Packed(w) => w.bulk(),
        }
    }

    /// The same with that elsewhere.
    fn moved(&self, block: Block) -> Base {
        match self {
            Base::Dense(m) => Base::Dense(Matrix::of(m.rows, m.cols, m.stored, block)),
            Base::Int8(Int8 { rows, cols, depth, scales, .. }) => Base::Int8(Int8 {
                rows: *rows,
                cols: *cols,
                depth: *depth,
                block: Arc::new(block),
                scales: Arc::clone(scales),
            }),
            Base::Fp8(Fp8 { rows, cols, depth, scales, .. }) => {
                let (rows, cols, depth) = (*rows, *cols, *depth);
                Base::Fp8(Fp8 { rows, cols, depth, block: Arc::new(block), scales: Arc::clone(scales) })
            }
            Base::Packed(packed) => Base::Packed(packed.moved(block)),
        }
    }
}

/// Where a weight lies between its uses.
enum Place {
    /// On the device.
    Here(Base),
    /// In the host's memory; of the base all but what is large.
    There(Base, Streamed),
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
    pub(crate) fn new(cx: &Context, parts: LinearParts) -> Result<CudaWeight> {
        let size @ [_, cols] = shapes::weight(&parts)?;
        let base = match parts.dtype() {
            Some(DType::I8) => Base::Int8(Int8::new(cx, &parts, size)?),
            None => Base::packed(cx, &parts, size)?,
            Some(_) if parts.fp8 => Base::Fp8(Fp8::new(cx, &parts.slabs, size)?),
            Some(_) => Base::Dense(Matrix::new(cx, "weight", &parts.slabs, cols)?),
        };
        let bias =
            parts.bias.as_ref().map(|bias| vector(cx, "weight", std::slice::from_ref(bias))).transpose()?;
        let deltas = LowRank::all(cx, &parts.deltas, cols)?;
        let (at, bytes) = base.bulk();
        let place = match cx.device.keeps(bytes) {
            true => Place::Here(base),
            false => {
                let streamed = cx.done(Streamed::new(&cx.device, at, bytes))?;
                Place::There(base.moved(Block::lent(&cx.device, 0)), streamed)
            }
        };
        Ok(CudaWeight { base: Arc::new(place), bias: bias.map(Arc::new), deltas })
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
            Place::Here(base) | Place::There(base, _) => base.size(),
        }
    }

    /// What an input of this type is multiplied with: brought in if it isn't on the device, written out if it is packed.
    pub(crate) fn present(&self, cx: &Context, dtype: DType) -> Result<Present<'_>> {
        match &*self.base {
            Place::Here(Base::Packed(packed)) => {
                Ok(Present::Made { base: Base::widened(cx, packed, dtype)?, _lender: None })
            }
            Place::Here(base) => Ok(Present::Here(base)),
            Place::There(base, streamed) => {
                let brought = cx.done(streamed.bring())?;
                let brought = brought.ok_or_else(|| cx.short_of(base.bulk().1))?;
                let base = match base.moved(Block::lent(&cx.device, brought.at)) {
                    Base::Packed(packed) => Base::widened(cx, &packed, dtype)?,
                    base => base,
                };
                Ok(Present::Made { base, _lender: Some(brought) })
            }
        }
    }
}

/// A convolution on the device.
pub struct CudaConv {
    /// `[out, in, height, width]`.
    pub(crate) size: [usize; 4],
    /// `[out, height · width · in]`.
    pub(crate) kernel: Matrix,
    pub(crate) bias: Option<Block>,
    /// The sums of taps for doubled pictures, made when they are first needed.
    pub(crate) folded: OnceLock<Block>,
}

impl CudaConv {
    pub(crate) fn new(cx: &Context, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<CudaConv> {
        let size @ [out, input, height, width] = shapes::conv(kernel, bias)?;
        let cols = input * height * width;
        let flat = match kernel.dtype() {
            DType::BF16 => {
                HostTensor::from_bf16([out, cols], channels_last(&kernel.to_bf16()?, input, height * width))?
            }
            DType::F16 => {
                let values: Vec<f16> = bytemuck::pod_collect_to_vec(kernel.bytes());
                let bytes = bytemuck::cast_vec::<f16, u16>(channels_last(&values, input, height * width));
                let bytes: Vec<u8> = bytemuck::cast_slice(&bytes).to_vec();
                HostTensor::new(DType::F16, [out, cols], bytes.into())?
            }
            DType::F32 | DType::F64 => {
                HostTensor::from_f32([out, cols], channels_last(&kernel.to_f32()?, input, height * width))?
            }
            dtype => return Err(Error::DType { op: "conv", dtype, backend: cx.name() }),
        };
        let kernel = Matrix::new(cx, "conv", &[flat], cols)?;
        let bias = bias.map(|bias| vector(cx, "conv", std::slice::from_ref(bias))).transpose()?;
        Ok(CudaConv { size, kernel, bias, folded: OnceLock::new() })
    }
}

/// `[out, in, taps]` as `[out, taps, in]`.
fn channels_last<T: Copy>(kernel: &[T], input: usize, taps: usize) -> Vec<T> {
    let mut last = Vec::with_capacity(kernel.len());
    for one in kernel.chunks_exact(input * taps) {
        for tap in 0..taps {
            last.extend((0..input).map(|channel| one[channel * taps + tap]));
        }
    }
    last
}

const _: () = assert!(size_of::<bf16>() == 2 && size_of::<f16>() == 2);

#[cfg(test)]
mod tests {
    use super::{channels_last, pad_rows, padded};

    #[test]
    fn rows_of_integers_end_with_zeros() {
        let (bytes, cols) = ([1, 2, 3, 4, 5, 6], 3);
        let rows = pad_rows(&bytes, cols, padded(cols));
        assert_eq!(rows.len(), 32);
        assert_eq!((&rows[..4], &rows[16..20]), (&[1, 2, 3, 0][..], &[4, 5, 6, 0][..]));
        assert_eq!(&*pad_rows(&bytes, 3, 3), &bytes);
    }

    #[test]
    fn a_kernels_channels_come_last() {
        // Two outputs, two inputs, three taps.
        let kernel: Vec<i32> = (0..12).collect();
        assert_eq!(channels_last(&kernel, 2, 3), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }
}

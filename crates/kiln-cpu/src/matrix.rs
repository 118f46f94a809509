//! Matrices of weights, read from the host's (perhaps memory-mapped) bytes and widened on the fly.

use kiln_ops::{Error, Result};
use kiln_tensor::packed::PackedTensor;
use kiln_tensor::{DType, HostTensor, Rotation, bf16, f16};
#[cfg(target_arch = "x86_64")]
use std::{ops::Range, sync::Arc};

use crate::Context;
use crate::element::Scalar;
use crate::gemm::RowSource;
#[cfg(target_arch = "aarch64")]
use crate::gemm::round_row_bf16;
#[cfg(target_arch = "x86_64")]
use crate::gemm::{Bf16Rows, PackedInt8Weight};
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::simd::{Simd, dispatch};

/// The number format of a [`StackedMatrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    BF16,
    F16,
    /// Has kernels of its own.
    I8,
    /// Blocks of a few bits, unpacked a part of a row at a time.
    Packed,
}

/// Matrices of one width and format, stacked by rows, each in the host's memory.
#[derive(Clone)]
pub(crate) struct StackedMatrix {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// The matrices, each with the row past its last one.
    parts: Vec<(usize, Storage)>,
}

#[derive(Clone)]
enum Storage {
    Dense(HostTensor),
    Packed(PackedTensor),
    /// All rows of an int8 weight, as tiles.
    #[cfg(target_arch = "x86_64")]
    AmxTiles(Arc<PackedInt8Weight>),
}

impl StackedMatrix {
    /// Stacks matrices of one width and dtype.
    pub fn new(op: &'static str, matrices: Vec<HostTensor>, cols: usize) -> Result<StackedMatrix> {
        let mut format = Format::F32;
        let mut rows = 0;
        let mut parts = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            let matrix = match matrix.dtype() {
                DType::F32 | DType::BF16 | DType::F16 | DType::I8 => matrix,
                DType::F64 => matrix.to_dtype(DType::F32)?,
                dtype => return Err(Error::DType { op, dtype, backend: "cpu".into() }),
            };
            format = match matrix.dtype() {
                DType::BF16 => Format::BF16,
                DType::F16 => Format::F16,
                DType::I8 => Format::I8,
                _ => Format::F32,
            };
            rows += matrix.shape().rows();
            parts.push((rows, Storage::Dense(matrix)));
        }
        Ok(StackedMatrix { format, rows, cols, parts })
    }

    /// Stacks packed matrices of one width.
    pub fn packed(matrices: Vec<PackedTensor>, cols: usize) -> StackedMatrix {
        let mut rows = 0;
        let mut parts = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            rows += matrix.row_count();
            parts.push((rows, Storage::Packed(matrix)));
        }
        StackedMatrix { format: Format::Packed, rows, cols, parts }
    }

    /// The matrix that has a row, and the row's index in it.
    #[inline(always)]
    fn find(&self, row: usize) -> (&Storage, usize) {
        let part = self.parts.partition_point(|&(end, _)| end <= row);
        let first = if part == 0 { 0 } else { self.parts[part - 1].0 };
        (&self.parts[part].1, row - first)
    }

    /// The bytes of a row of a dense matrix, without alignment.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[u8] {
        let bytes = match self.format {
            Format::F32 => 4 * self.cols,
            Format::BF16 | Format::F16 => 2 * self.cols,
            Format::I8 => self.cols,
            Format::Packed => unreachable!("packed rows are read by `unpack`"),
        };
        match self.find(row) {
            (Storage::Dense(matrix), row) => &matrix.bytes()[row * bytes..][..bytes],
            _ => unreachable!("only dense matrices are read by rows"),
        }
    }

    /// Packs an int8 matrix as tiles where AMX multiplies int8; the tiles replace the rows.
    pub fn pack_int8(self, cx: &Context) -> Result<StackedMatrix> {
        match cx.level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx(amx) if self.format == Format::I8 && amx.has_int8() => {
                let tiles =
                    Arc::new(PackedInt8Weight::new(cx, amx, [self.rows, self.cols], |row| self.row(row))?);
                Ok(StackedMatrix { parts: vec![(self.rows, Storage::AmxTiles(tiles))], ..self })
            }
            _ => Ok(self),
        }
    }

    /// The tiles of an int8 matrix that was packed for AMX.
    #[cfg(target_arch = "x86_64")]
    pub fn amx_tiles(&self) -> Option<&PackedInt8Weight> {
        match self.parts.first() {
            Some((_, Storage::AmxTiles(tiles))) => Some(tiles),
            _ => None,
        }
    }

    /// The bytes of some rows, if they are contiguous, and the stride of a row.
    #[cfg(target_arch = "x86_64")]
    pub fn contiguous_rows(&self, rows: Range<usize>) -> Option<(&[u8], usize)> {
        let (Storage::Dense(matrix), first) = self.find(rows.start) else { return None };
        let bytes = matrix.bytes();
        let stride = bytes.len() / matrix.shape().rows();
        Some((bytes.get(first * stride..(first + rows.len()) * stride)?, stride))
    }

    /// Unpacks a row of a packed matrix from column `from` on. Not inlined into the many kernels that call it: the decoders
    /// would make each of them several times its size.
    pub fn unpack<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        unpack_row(s.level(), self, row, from, out);
    }

    #[inline(always)]
    fn unpack_inline(&self, row: usize, from: usize, out: &mut [f32]) {
        match self.find(row) {
            (Storage::Packed(matrix), row) => matrix.read(row, from, out),
            _ => unreachable!("a matrix of this format is packed"),
        }
    }
}

#[inline(always)]
fn unpack_kernel<S: Simd>(_: S, matrix: &StackedMatrix, row: usize, from: usize, out: &mut [f32]) {
    matrix.unpack_inline(row, from, out);
}

dispatch! {
    fn unpack_row(matrix: &StackedMatrix, row: usize, from: usize, out: &mut [f32]) => unpack_kernel;
}

/// Rounds other formats to bf16.
#[cfg(target_arch = "x86_64")]
impl Bf16Rows for StackedMatrix {
    fn copy_row(&self, row: usize, from: usize, out: &mut [bf16]) {
        fn round<T: Scalar>(bytes: &[u8], from: usize, out: &mut [bf16]) {
            let values = bytes[from * size_of::<T>()..].chunks_exact(size_of::<T>());
            for (out, value) in out.iter_mut().zip(values) {
                *out = bf16::from_f32(bytemuck::pod_read_unaligned::<T>(value).widen());
            }
        }
        if out.is_empty() {
            return;
        }
        match self.format {
            Format::BF16 => {
                let count = size_of_val(out);
                bytemuck::cast_slice_mut(out).copy_from_slice(&self.row(row)[2 * from..][..count]);
            }
            Format::F32 => round::<f32>(self.row(row), from, out),
            Format::F16 => round::<f16>(self.row(row), from, out),
            Format::I8 | Format::Packed => unreachable!("convolution kernels are dense floats"),
        }
    }
}

/// An int8 weight with one scale per row.
#[derive(Clone, Copy)]
pub(crate) struct Int8Weight<'a> {
    pub matrix: &'a StackedMatrix,
    pub scales: &'a [f32],
    pub rotation: Rotation,
}

/// A matrix whose first row is row `first_row` of a larger one that is zero elsewhere.
pub(crate) struct ZeroPadded<'a> {
    pub matrix: &'a StackedMatrix,
    pub first_row: usize,
}

impl RowSource for ZeroPadded<'_> {
    #[inline(always)]
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        if row < self.first_row || row >= self.first_row + self.matrix.rows {
            return out.fill(0.0);
        }
        let (matrix, row) = (self.matrix, row - self.first_row);
        match matrix.format {
            Format::F32 => widen::<S, f32>(s, matrix.row(row), from, out),
            Format::BF16 => widen::<S, bf16>(s, matrix.row(row), from, out),
            Format::F16 => widen::<S, f16>(s, matrix.row(row), from, out),
            Format::Packed => matrix.unpack(s, row, from, out),
            Format::I8 => unreachable!("int8 weights have kernels of their own"),
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn read_row_bf16<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [bf16]) {
        let rows = self.first_row..self.first_row + self.matrix.rows;
        if self.matrix.format == Format::BF16 && rows.contains(&row) {
            let bytes = &self.matrix.row(row - self.first_row)[2 * from..][..size_of_val(out)];
            return bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
        }
        round_row_bf16(self, s, row, from, out);
    }
}

/// The rows of a weight with their dequantized values, int8 included; rows past the end are zeros.
#[derive(Clone, Copy)]
pub(crate) struct DequantizedRows<'a> {
    pub matrix: &'a StackedMatrix,
    /// The scale of every row of an int8 weight; else empty.
    pub scales: &'a [f32],
    /// How the rows of an int8 weight are rotated.
    pub rotation: Rotation,
}

impl DequantizedRows<'_> {
    /// Integers of a row times its scale, from column `from` on, rotated as they are.
    #[inline(always)]
    fn read_int8(&self, row: usize, from: usize, out: &mut [f32]) {
        let scale = self.scales[row];
        #[cfg(target_arch = "x86_64")]
        if let Some(tiles) = self.matrix.amx_tiles() {
            return tiles.dequantize_row(row, from, scale, out);
        }
        let integers = &self.matrix.row(row)[from..];
        out.iter_mut().zip(integers).for_each(|(out, &v)| *out = f32::from(v as i8) * scale);
    }
}

impl RowSource for DequantizedRows<'_> {
    #[inline(always)]
    fn read_row<S: Simd>(&self, s: S, row: usize, from: usize, out: &mut [f32]) {
        if self.matrix.format != Format::I8 || row >= self.matrix.rows {
            return ZeroPadded { matrix: self.matrix, first_row: 0 }.read_row(s, row, from, out);
        }
        let (group, end) = (self.rotation.group(), from + out.len());
        if group == 1 {
            return self.read_int8(row, from, out);
        }
        // Whole groups are rotated back, of which the columns may be a part.
        let mut whole = [0.0; Rotation::MAX_GROUP];
        let whole = &mut whole[..group];
        for first in (from / group * group..end).step_by(group) {
            self.read_int8(row, first, whole);
            self.rotation.rotate(whole);
            let (start, stop) = (first.max(from), (first + group).min(end));
            out[start - from..stop - from].copy_from_slice(&whole[start - first..stop - first]);
        }
    }
}

/// Widens the elements from index `from` on; the bytes need no alignment.
#[inline(always)]
fn widen<S: Simd, T: Scalar>(s: S, bytes: &[u8], from: usize, out: &mut [f32]) {
    let bytes = &bytes[from * size_of::<T>()..][..size_of_val(out) / 4 * size_of::<T>()];
    let x = bytes.as_ptr().cast::<T>();
    let whole = out.len() / S::LANES * S::LANES;
    let mut i = 0;
    while i < whole {
        // SAFETY: i + LANES <= out.len(), and as many elements are in `bytes`.
        unsafe { s.store(out.as_mut_ptr().add(i), T::load(s, x.add(i))) };
        i += S::LANES;
    }
    for (i, out) in out.iter_mut().enumerate().skip(whole) {
        // SAFETY: i < out.len().
        *out = unsafe { x.add(i).read_unaligned() }.widen();
    }
}

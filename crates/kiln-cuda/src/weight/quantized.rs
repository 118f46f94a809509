//! int8 and fp8 matrices with one scale per row.

use std::borrow::Cow;

use kiln_ops::{Error, Result};
use kiln_tensor::packed::PackedTensor;
use kiln_tensor::{DType, HostTensor, Rotation};

use super::matrix::{upload_floats, vector};
use crate::context::{Context, int};
use crate::ops::quantize_fp8::{TRANSPOSE_FP8, TransposeFp8, quantize_rows};
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;

/// An int8 or fp8 matrix with one scale per row.
pub(crate) struct QuantizedMatrix {
    pub rows: usize,
    pub cols: usize,
    /// Bytes from row to row: a multiple of 16, zero-padded.
    pub depth: usize,
    /// How int8 rows are rotated.
    pub rotation: Rotation,
    buffer: DeviceBuffer,
    scales: DeviceBuffer,
}

impl QuantizedMatrix {
    /// Uploads int8 rows with their scales.
    pub fn from_int8(
        cx: &Context,
        rows: &[HostTensor],
        scales: &[HostTensor],
        rotation: Rotation,
        size: [usize; 2],
    ) -> Result<QuantizedMatrix> {
        let scales = vector(cx, "weight", scales)?;
        let matrix =
            QuantizedMatrix::upload(cx, rows.iter().map(|matrix| &matrix.bytes()[..]), scales, size)?;
        Ok(QuantizedMatrix { rotation, ..matrix })
    }

    /// Uploads fp8 rows with the file's scales.
    pub fn from_fp8(cx: &Context, packed: &[PackedTensor], size: [usize; 2]) -> Result<QuantizedMatrix> {
        check_fp8(cx)?;
        let scales: Vec<f32> = packed.iter().flat_map(PackedTensor::row_scales).collect();
        QuantizedMatrix::upload(
            cx,
            packed.iter().map(|matrix| &matrix.bytes()[..]),
            upload_floats(cx, &scales)?,
            size,
        )
    }

    fn upload<'a>(
        cx: &Context,
        matrices: impl Iterator<Item = &'a [u8]>,
        scales: DeviceBuffer,
        [rows, cols]: [usize; 2],
    ) -> Result<QuantizedMatrix> {
        let depth = padded_row_bytes(cols);
        let buffer = cx.allocate(rows * depth)?;
        let mut at = buffer.ptr(cx);
        for matrix in matrices {
            let bytes = pad_rows(matrix, cols, depth);
            cx.check(cx.upload(&bytes, at))?;
            at += bytes.len() as u64;
        }
        Ok(QuantizedMatrix { rows, cols, depth, rotation: Rotation::None, buffer, scales })
    }

    /// Quantizes matrices to fp8 on the device.
    pub fn quantize_fp8(
        cx: &Context,
        matrices: &[HostTensor],
        [rows, cols]: [usize; 2],
    ) -> Result<QuantizedMatrix> {
        check_fp8(cx)?;
        let depth = padded_row_bytes(cols);
        let (buffer, scales) = (cx.allocate(rows * depth)?, cx.allocate(rows * 4)?);
        let quantized = QuantizedMatrix { rows, cols, depth, rotation: Rotation::None, buffer, scales };
        let mut first = 0;
        for matrix in matrices {
            let matrix =
                if matrix.dtype() == DType::BF16 { matrix.clone() } else { matrix.to_dtype(DType::F32)? };
            let buffer = cx.allocate(matrix.bytes().len())?;
            cx.check(cx.upload(matrix.bytes(), buffer.ptr(cx)))?;
            let height = matrix.shape().rows();
            quantize_rows(
                cx,
                matrix.dtype(),
                [buffer.ptr(cx); 2],
                [cols, 0],
                height,
                quantized.ptr(cx, first),
                depth,
            )?;
            first += height;
        }
        Ok(quantized)
    }

    /// The transpose of an fp8 matrix without its scales: rows of `rows` bytes, each with a scale of 1.
    pub fn transposed_fp8(&self, cx: &Context) -> Result<QuantizedMatrix> {
        let (rows, cols) = (self.cols, self.rows);
        let depth = padded_row_bytes(cols);
        let (buffer, scales) = (cx.allocate(rows * depth)?, cx.allocate(rows * 4)?);
        let size = |n: usize| int("linear_backward", n);
        let parameters = TransposeFp8 {
            x: self.buffer.ptr(cx),
            out: buffer.ptr(cx),
            scales: scales.ptr(cx),
            rows: size(self.rows)?,
            cols: size(self.cols)?,
            depth: size(self.depth)?,
            out_depth: size(depth)?,
        };
        cx.launch(TRANSPOSE_FP8, [rows.div_ceil(128), cols.div_ceil(128)], 256, 0, &parameters)?;
        Ok(QuantizedMatrix { rows, cols, depth, rotation: Rotation::None, buffer, scales })
    }

    /// Addresses of row `row` and of its scale.
    pub fn ptr(&self, cx: &Context, row: usize) -> [DevicePtr; 2] {
        [self.buffer.ptr(cx) + (row * self.depth) as u64, self.scales.ptr(cx) + 4 * row as u64]
    }

    /// Address and size of the values, without scales.
    pub fn payload(&self, cx: &Context) -> (DevicePtr, usize) {
        (self.buffer.ptr(cx), self.rows * self.depth)
    }

    /// Returns the same matrix with its values in another buffer.
    pub fn with_buffer(&self, buffer: DeviceBuffer) -> QuantizedMatrix {
        QuantizedMatrix { buffer, scales: self.scales.clone(), ..*self }
    }

    /// Returns the same matrix with other scales of its rows.
    pub fn with_scales(&self, scales: DeviceBuffer) -> QuantizedMatrix {
        QuantizedMatrix { buffer: self.buffer.clone(), scales, ..*self }
    }
}

/// Fails if the GPU has no fp8 tensor cores.
fn check_fp8(cx: &Context) -> Result<()> {
    if cx.gpu().has_fp8() {
        Ok(())
    } else {
        Err(Error::DType { op: "weight", dtype: DType::F8E4M3, backend: cx.name() })
    }
}

/// Bytes per row, padded so that every row is aligned to 16 bytes.
fn padded_row_bytes(cols: usize) -> usize {
    cols.next_multiple_of(16)
}

/// Pads rows of `cols` bytes to `depth` bytes.
pub(super) fn pad_rows(bytes: &[u8], cols: usize, depth: usize) -> Cow<'_, [u8]> {
    if cols == depth {
        return bytes.into();
    }
    let mut out = vec![0; bytes.len() / cols * depth];
    for (row, out) in bytes.chunks_exact(cols).zip(out.chunks_exact_mut(depth)) {
        out[..cols].copy_from_slice(row);
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::{pad_rows, padded_row_bytes};

    #[test]
    fn rows_are_padded_with_zeros() {
        let (bytes, cols) = ([1, 2, 3, 4, 5, 6], 3);
        let rows = pad_rows(&bytes, cols, padded_row_bytes(cols));
        assert_eq!(rows.len(), 32);
        assert_eq!((&rows[..4], &rows[16..20]), (&[1, 2, 3, 0][..], &[4, 5, 6, 0][..]));
        assert_eq!(&*pad_rows(&bytes, 3, 3), &bytes);
    }
}

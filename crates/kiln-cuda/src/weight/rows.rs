//! Matrices of bytes with a scale for every row: integers, and 8-bit floats.

use std::borrow::Cow;

use kiln_ops::{Error, Result};
use kiln_tensor::packed::Packed;
use kiln_tensor::{DType, HostTensor};

use super::matrix::{upload_floats, vector};
use crate::context::Context;
use crate::ops::round_fp8::round_rows;
use crate::queue::Block;
use crate::sys::driver::DevicePtr;

/// Bytes, integers or floats, with a scale for every row.
pub(crate) struct ByteRows {
    pub rows: usize,
    pub cols: usize,
    /// Bytes from row to row: a multiple of 16, zeros after the last column.
    pub depth: usize,
    block: Block,
    scales: Block,
}

impl ByteRows {
    /// Integers of a file, with its scales.
    pub fn integers(
        cx: &Context,
        rows: &[HostTensor],
        scales: &[HostTensor],
        size: [usize; 2],
    ) -> Result<ByteRows> {
        let scales = vector(cx, "weight", scales)?;
        ByteRows::stored(cx, rows.iter().map(|slab| &slab.bytes()[..]), scales, size)
    }

    /// 8-bit floats of a file, with its scales.
    pub fn floats(cx: &Context, packed: &[Packed], size: [usize; 2]) -> Result<ByteRows> {
        check(cx)?;
        let scales: Vec<f32> = packed.iter().flat_map(Packed::row_scales).collect();
        ByteRows::stored(
            cx,
            packed.iter().map(|matrix| &matrix.bytes()[..]),
            upload_floats(cx, &scales)?,
            size,
        )
    }

    fn stored<'a>(
        cx: &Context,
        slabs: impl Iterator<Item = &'a [u8]>,
        scales: Block,
        [rows, cols]: [usize; 2],
    ) -> Result<ByteRows> {
        let depth = padded(cols);
        let block = cx.block(rows * depth)?;
        let mut at = block.at(cx);
        for slab in slabs {
            let bytes = pad_rows(slab, cols, depth);
            cx.done(cx.upload(&bytes, at))?;
            at += bytes.len() as u64;
        }
        Ok(ByteRows { rows, cols, depth, block, scales })
    }

    /// Matrices of any type rounded to 8-bit floats, on the device.
    pub fn rounded(cx: &Context, slabs: &[HostTensor], [rows, cols]: [usize; 2]) -> Result<ByteRows> {
        check(cx)?;
        let depth = padded(cols);
        let (block, scales) = (cx.block(rows * depth)?, cx.block(rows * 4)?);
        let made = ByteRows { rows, cols, depth, block, scales };
        let mut first = 0;
        for slab in slabs {
            let slab = if slab.dtype() == DType::BF16 { slab.clone() } else { slab.to_dtype(DType::F32)? };
            let block = cx.block(slab.bytes().len())?;
            cx.done(cx.upload(slab.bytes(), block.at(cx)))?;
            let height = slab.shape().rows();
            round_rows(cx, slab.dtype(), [block.at(cx); 2], [cols, 0], height, made.at(cx, first), depth)?;
            first += height;
        }
        Ok(made)
    }

    /// Address of row `row` and of its scale.
    pub fn at(&self, cx: &Context, row: usize) -> [DevicePtr; 2] {
        [self.block.at(cx) + (row * self.depth) as u64, self.scales.at(cx) + 4 * row as u64]
    }

    /// Address and size of all but the scales.
    pub fn bulk(&self, cx: &Context) -> (DevicePtr, usize) {
        (self.block.at(cx), self.rows * self.depth)
    }

    /// The same with that elsewhere.
    pub fn moved(&self, block: Block) -> ByteRows {
        ByteRows { block, scales: self.scales.clone(), ..*self }
    }
}

/// Whether the GPU has products of 8-bit floats.
fn check(cx: &Context) -> Result<()> {
    match cx.gpu().has_fp8() {
        true => Ok(()),
        false => Err(Error::DType { op: "weight", dtype: DType::F8E4M3, backend: cx.name() }),
    }
}

/// Bytes of a row of integers, so that rows begin where 16 bytes can be read at once.
fn padded(cols: usize) -> usize {
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

#[cfg(test)]
mod tests {
    use super::{pad_rows, padded};

    #[test]
    fn rows_of_integers_end_with_zeros() {
        let (bytes, cols) = ([1, 2, 3, 4, 5, 6], 3);
        let rows = pad_rows(&bytes, cols, padded(cols));
        assert_eq!(rows.len(), 32);
        assert_eq!((&rows[..4], &rows[16..20]), (&[1, 2, 3, 0][..], &[4, 5, 6, 0][..]));
        assert_eq!(&*pad_rows(&bytes, 3, 3), &bytes);
    }
}

//! nvfp4 matrices for nvfp4 products.

use kiln_ops::{Error, Result};
use kiln_tensor::DType;
use kiln_tensor::packed::{BLOCK_COLS, Format, PackedTensor, Scales};

use super::matrix::upload_floats;
use super::packed::{DEQUANTIZE, Dequantize};
use super::quantized::pad_rows;
use crate::context::{Context, int};
use crate::kernels::PackedMatrixArgs;
use crate::ops::grid::{THREADS, row_grid};
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;

/// Rows are padded to whole steps of `gemm_mma_nvfp4.cu`, in columns.
const STEP: usize = 128;

/// A matrix of 4-bit floats, two in a byte, with a scale per block of 16 columns and one per row.
pub(crate) struct Nvfp4Matrix {
    pub rows: usize,
    pub cols: usize,
    /// Bytes from row to row, zero-padded; the scales of blocks have an eighth of them.
    pub depth: usize,
    /// Whether the first of two values is in the high half of their byte. Files have either; activations are written alike, and
    /// the product does not depend on it.
    pub high_first: bool,
    buffer: DeviceBuffer,
    blocks: DeviceBuffer,
    scales: DeviceBuffer,
}

impl Nvfp4Matrix {
    /// Uploads matrices that [are nvfp4](PackedTensor::is_nvfp4), stacked by rows.
    pub fn new(cx: &Context, packed: &[PackedTensor], [rows, cols]: [usize; 2]) -> Result<Nvfp4Matrix> {
        if !cx.gpu().has_nvfp4() {
            let what = format!("no nvfp4 matmul on {}", cx.name());
            return Err(Error::Arguments { op: "weight", what });
        }
        let padded = cols.next_multiple_of(STEP);
        let (depth, row_blocks) = (padded / 2, padded / BLOCK_COLS);
        let (buffer, blocks) = (cx.allocate(rows * depth)?, cx.allocate(rows * row_blocks)?);
        let scales: Vec<f32> = packed.iter().flat_map(PackedTensor::row_scales).collect();
        let scales = upload_floats(cx, &scales)?;
        let (mut at, mut blocks_at, mut order) = (buffer.ptr(cx), blocks.ptr(cx), None);
        for matrix in packed {
            let Scales::PerBlock { scales, high_first, .. } = matrix.scales() else { continue };
            let mut bytes = pad_rows(matrix.bytes(), cols / 2, depth);
            if *order.get_or_insert(high_first) != high_first {
                bytes.to_mut().iter_mut().for_each(|pair| *pair = pair.rotate_left(4));
            }
            let scales = pad_rows(&scales, cols / BLOCK_COLS, row_blocks);
            cx.check(cx.upload(&bytes, at))?;
            cx.check(cx.upload(&scales, blocks_at))?;
            at += bytes.len() as u64;
            blocks_at += scales.len() as u64;
        }
        Ok(Nvfp4Matrix { rows, cols, depth, high_first: order.unwrap_or(true), buffer, blocks, scales })
    }

    /// Addresses of row `row`, of the scales of its blocks, and of its scale.
    pub fn ptr(&self, cx: &Context, row: usize) -> [DevicePtr; 3] {
        let (values, blocks) = ((row * self.depth) as u64, (row * self.depth / 8) as u64);
        [self.buffer.ptr(cx) + values, self.blocks.ptr(cx) + blocks, self.scales.ptr(cx) + 4 * row as u64]
    }

    /// Address and size of the values, without scales.
    pub fn payload(&self, cx: &Context) -> (DevicePtr, usize) {
        (self.buffer.ptr(cx), self.rows * self.depth)
    }

    /// Returns the same matrix with its values in another buffer.
    pub fn with_buffer(&self, buffer: DeviceBuffer) -> Nvfp4Matrix {
        Nvfp4Matrix { buffer, blocks: self.blocks.clone(), scales: self.scales.clone(), ..*self }
    }

    /// Returns the same matrix with other scales of its rows.
    pub fn with_scales(&self, scales: DeviceBuffer) -> Nvfp4Matrix {
        Nvfp4Matrix { buffer: self.buffer.clone(), blocks: self.blocks.clone(), scales, ..*self }
    }

    /// Dequantizes all values to f32 or bf16.
    pub fn dequantize(&self, cx: &Context, dtype: DType) -> Result<DeviceBuffer> {
        let out = cx.allocate(self.rows * self.cols * dtype.size())?;
        let [data, block_scales, row_scales] = self.ptr(cx, 0);
        let w = PackedMatrixArgs {
            data,
            row_scales,
            block_scales,
            tile_scales: 0,
            rows: self.rows as i64,
            row_bytes: self.depth as i64,
            cols: int("linear", self.cols)?,
            format: Format::NvFp4 as i32,
            scale: 1.0,
            high_first: self.high_first.into(),
            tile_rows: 1,
            tile_cols: 1,
            tile_start: 0,
            block_bytes: int("linear", self.depth / 8)?,
        };
        let parameters = Dequantize { w, out: out.ptr(cx) };
        cx.launch(DEQUANTIZE.of(dtype), row_grid(self.rows, self.cols), THREADS, 0, &parameters)?;
        Ok(out)
    }
}

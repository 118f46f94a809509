//! Packed tensors: matrices of quantized values (GGUF blocks, int8, fp8, nvfp4) with their scales.
//!
//! A backend keeps such a weight as it is stored and dequantizes pieces of rows while it multiplies
//! ([`PackedTensor::read`]). Only this module knows the meaning of the bytes: `format` has the block sizes, `blocks`,
//! `k_blocks` and `small_floats` the decoders, `scales` the separately stored scales, [`encode`] the encoders.
//!
//! ```
//! use kiln_tensor::packed::{Format, PackedTensor};
//!
//! // A Q8_0 block: d = 0.5 as f16, then 32 bytes.
//! let mut block = vec![0x00, 0x38];
//! block.extend((0..32u8).map(|q| q.wrapping_sub(16)));
//! let matrix = PackedTensor::new(Format::Q8_0, [1, 32], block.into())?;
//! let mut values = [0.0; 3];
//! matrix.read(0, 15, &mut values);
//! assert_eq!(values, [-0.5, 0.0, 0.5]);
//! # Ok::<(), kiln_tensor::Error>(())
//! ```
//!
//! The decoders give the bits of the `gguf` Python package (`tools/formats`).

mod blocks;
pub mod encode;
mod format;
mod k_blocks;
mod patch;
mod read;
mod scales;
pub mod small_floats;

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use half::bf16;

use crate::{DType, Error, HostTensor, Result, Shape};
pub use format::Format;
use patch::AppliedPatch;
pub use patch::Patch;
pub use read::StackedRows;
use scales::SharedScales;
pub use scales::{BLOCK_COLS, BlockScales, Scales, TileScales, swizzled_index};

/// A packed matrix. The bytes are shared: cloning and slicing rows copy nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedTensor {
    format: Format,
    shape: Shape,
    data: Bytes,
    scales: SharedScales,
    patch: Option<AppliedPatch>,
}

impl PackedTensor {
    /// Creates a `[rows, cols]` matrix from exactly the bytes it needs; `cols` must be a whole number of blocks.
    pub fn new(format: Format, shape: impl Into<Shape>, data: Bytes) -> Result<PackedTensor> {
        let shape = shape.into();
        let &[rows, cols] = shape.dims() else { return Err(Error::Blocks { format, shape }) };
        let row = format.row_bytes(cols).ok_or_else(|| Error::Blocks { format, shape: shape.clone() })?;
        let expected = row.checked_mul(rows).ok_or_else(|| Error::TooLarge(shape.clone()))?;
        if data.len() != expected {
            return Err(Error::PackedLength { shape, format, expected, found: data.len() });
        }
        Ok(PackedTensor { format, shape, data, scales: SharedScales::None, patch: None })
    }

    /// Creates a packed tensor from a dense matrix, sharing its bytes; types without a format become f32.
    pub fn from_dense(dense: &HostTensor) -> Result<PackedTensor> {
        let (format, dense) = match dense.dtype() {
            DType::F32 => (Format::F32, dense.clone()),
            DType::BF16 => (Format::BF16, dense.clone()),
            DType::F16 => (Format::F16, dense.clone()),
            DType::F8E4M3 => (Format::F8E4M3, dense.clone()),
            DType::F8E5M2 => (Format::F8E5M2, dense.clone()),
            _ => (Format::F32, dense.to_dtype(DType::F32)?),
        };
        PackedTensor::new(format, dense.shape(), dense.bytes().clone())
    }

    /// Multiplies all values by `scale`.
    pub fn with_scale(self, scale: f32) -> PackedTensor {
        PackedTensor { scales: SharedScales::PerTensor(scale), ..self }
    }

    /// Multiplies each row by its scale.
    pub fn with_row_scales(self, scales: &[f32]) -> Result<PackedTensor> {
        if scales.len() != self.row_count() {
            return Err(Error::Scales { shape: self.shape, found: scales.len() });
        }
        Ok(PackedTensor { scales: SharedScales::PerRow { scales: scales.into(), first_row: 0 }, ..self })
    }

    /// Multiplies each tile by its scale; for fp8 only.
    pub fn with_tile_scales(self, scales: TileScales) -> Result<PackedTensor> {
        let (tiles, found) = (scales.tiles([self.row_count(), self.cols()]), scales.scales.len());
        let expected = tiles.and_then(|[down, across]| down.checked_mul(across));
        if !matches!(self.format, Format::F8E4M3 | Format::F8E5M2) || expected != Some(found) {
            return Err(Error::Scales { shape: self.shape, found });
        }
        Ok(PackedTensor { scales: SharedScales::PerTile { scales, first_row: 0 }, ..self })
    }

    /// Multiplies each block of 16 columns by its scale; for nvfp4 only.
    pub fn with_block_scales(self, scales: BlockScales) -> Result<PackedTensor> {
        let (expected, found) = (scales.expected_len([self.row_count(), self.cols()]), scales.scales.len());
        if self.format != Format::NvFp4 || expected != Some(found) {
            return Err(Error::Scales { shape: self.shape, found });
        }
        Ok(PackedTensor { scales: SharedScales::PerBlock { scales, first_row: 0 }, ..self })
    }

    /// Applies `patch` to the values whenever they are read; replaces an earlier patch.
    ///
    /// Row 0 of this tensor is row `first_row` of the patch. Dequantized as a whole, the values have type `dtype`, f32 or
    /// bf16.
    pub fn patched(self, patch: Arc<dyn Patch>, first_row: usize, dtype: DType) -> PackedTensor {
        PackedTensor { patch: Some(AppliedPatch { patch, first_row, dtype }), ..self }
    }

    /// Whether a patch changes the stored values.
    pub fn is_patched(&self) -> bool {
        self.patch.is_some()
    }

    /// Whether the bytes can be the operand of an fp8 matmul: unpatched e4m3 with at most a scale per row.
    pub fn is_fp8(&self) -> bool {
        let tiled = matches!(self.scales, SharedScales::PerTile { .. });
        self.format == Format::F8E4M3 && !tiled && !self.is_patched()
    }

    /// Whether the bytes can be the operand of an nvfp4 matmul: unpatched nvfp4 with block scales, none of them negative.
    pub fn is_nvfp4(&self) -> bool {
        match &self.scales {
            SharedScales::PerBlock { scales, .. } => {
                !self.is_patched() && scales.scales.iter().all(|s| s & 0x80 == 0)
            }
            _ => false,
        }
    }

    /// The storage format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// `[rows, cols]`.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The packed values, without separately stored scales.
    pub fn bytes(&self) -> &Bytes {
        &self.data
    }

    /// Number of rows.
    pub fn row_count(&self) -> usize {
        self.shape.rows()
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.shape.last()
    }

    /// The scale of the whole tensor, if it has one.
    pub fn scale(&self) -> Option<f32> {
        match &self.scales {
            SharedScales::PerTensor(scale) => Some(*scale),
            SharedScales::PerBlock { scales, .. } => Some(scales.global),
            SharedScales::None | SharedScales::PerRow { .. } | SharedScales::PerTile { .. } => None,
        }
    }

    /// The scale of every row, without those of tiles and blocks.
    pub fn row_scales(&self) -> Vec<f32> {
        match &self.scales {
            SharedScales::PerRow { scales, first_row } => {
                scales[*first_row..first_row + self.row_count()].to_vec()
            }
            _ => vec![self.scale().unwrap_or(1.0); self.row_count()],
        }
    }

    /// All scales in a plain layout, for a backend with its own decoder.
    pub fn scales(&self) -> Scales {
        match &self.scales {
            SharedScales::None => Scales::PerTensor(1.0),
            SharedScales::PerTensor(scale) => Scales::PerTensor(*scale),
            SharedScales::PerRow { .. } => Scales::PerRow(self.row_scales()),
            SharedScales::PerTile { scales: TileScales { scales, tile }, first_row } => {
                let across = self.cols().div_ceil(tile[1]);
                let (first, end) = (first_row / tile[0], (first_row + self.row_count()).div_ceil(tile[0]));
                Scales::PerTile {
                    scales: scales[first * across..end * across].to_vec(),
                    tile: *tile,
                    first_row: first_row % tile[0],
                }
            }
            SharedScales::PerBlock { scales, first_row } => {
                let (rows, blocks) = (*first_row..first_row + self.row_count(), self.cols() / BLOCK_COLS);
                let row_major = rows.flat_map(|row| (0..blocks).map(move |block| (row, block)));
                let bytes = row_major.map(|(row, block)| scales.get(row, block, blocks)).collect();
                Scales::PerBlock { global: scales.global, scales: bytes, high_first: scales.high_first }
            }
        }
    }

    /// Slices rows, sharing the bytes.
    pub fn rows(&self, range: Range<usize>) -> Result<PackedTensor> {
        let rows = self.row_count();
        if range.start > range.end || range.end > rows {
            return Err(Error::Rows { start: range.start, end: range.end, shape: self.shape.clone() });
        }
        let row = self.data.len() / rows.max(1);
        let mut slice = PackedTensor {
            shape: [range.len(), self.cols()].into(),
            data: self.data.slice(range.start * row..range.end * row),
            ..self.clone()
        };
        if let SharedScales::PerRow { first_row, .. }
        | SharedScales::PerTile { first_row, .. }
        | SharedScales::PerBlock { first_row, .. } = &mut slice.scales
        {
            *first_row += range.start;
        }
        if let Some(patch) = &mut slice.patch {
            patch.first_row += range.start;
        }
        Ok(slice)
    }

    /// Dequantizes to f32.
    pub fn to_f32(&self) -> Result<HostTensor> {
        HostTensor::from_f32(&self.shape, self.values(|v| v))
    }

    /// Dequantizes to bf16, rounding.
    pub fn to_bf16(&self) -> Result<HostTensor> {
        HostTensor::from_bf16(&self.shape, self.values(bf16::from_f32))
    }

    /// Dequantizes to [`dense_dtype`](PackedTensor::dense_dtype).
    pub fn to_dense(&self) -> Result<HostTensor> {
        match self.dense_dtype() {
            DType::F32 => self.to_f32(),
            _ => self.to_bf16(),
        }
    }

    /// The dtype of the dequantized tensor: f32 if the values are stored or patched as f32, otherwise bf16.
    pub fn dense_dtype(&self) -> DType {
        match (&self.patch, self.format) {
            (Some(AppliedPatch { dtype: DType::F32, .. }), _) | (None, Format::F32) => DType::F32,
            _ => DType::BF16,
        }
    }

    /// All values, row-major, on as many threads as pay off; the result does not depend on their number.
    fn values<T: Copy + Default + Send>(&self, convert: impl Fn(f32) -> T + Copy + Sync) -> Vec<T> {
        let cols = self.cols();
        let mut values = vec![T::default(); self.shape.numel()];
        // A matrix without rows may claim more columns than fit in memory.
        if values.is_empty() {
            return values;
        }
        let fill = |first_row: usize, values: &mut [T]| {
            let mut row_values = vec![0f32; cols];
            for (row, out) in values.chunks_exact_mut(cols).enumerate() {
                self.read(first_row + row, 0, &mut row_values);
                out.iter_mut().zip(&row_values).for_each(|(out, v)| *out = convert(*v));
            }
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(values.len().div_ceil(VALUES_PER_THREAD));
        if threads < 2 {
            fill(0, &mut values);
            return values;
        }
        let rows = self.row_count().div_ceil(threads);
        thread::scope(|scope| {
            for (i, chunk) in values.chunks_mut(rows * cols).enumerate() {
                scope.spawn(move || fill(i * rows, chunk));
            }
        });
        values
    }
}

/// Fewer values than this are not worth another thread.
const VALUES_PER_THREAD: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudo-random bytes; the mask keeps f16 scales among them finite.
    fn noise(count: usize) -> Bytes {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8 & 0xbb
        };
        (0..count).map(|_| next()).collect::<Vec<u8>>().into()
    }

    #[test]
    fn pieces_of_a_row_have_the_values_of_the_whole_row() {
        for format in Format::all() {
            let (rows, cols) = (3, 512);
            let data = noise(rows * format.row_bytes(cols).unwrap());
            let mut matrix = PackedTensor::new(format, [rows, cols], data).unwrap();
            if format == Format::NvFp4 {
                let scales =
                    BlockScales { scales: noise(128 * 32), swizzled: true, high_first: true, global: 0.5 };
                matrix = matrix.with_block_scales(scales).unwrap();
            }
            let whole = matrix.to_f32().unwrap();
            let whole = whole.to_f32().unwrap();
            for (from, count) in
                [(0, 1), (1, 31), (15, 300), (255, 2), (256, 256), (511, 1), (512, 0), (0, 384)]
            {
                let mut piece = vec![0.0; count];
                matrix.rows(1..3).unwrap().read(1, from, &mut piece);
                assert_eq!(piece, &whole[2 * cols + from..][..count], "{format} from {from}");
            }
        }
    }

    #[test]
    fn sizes_are_checked() {
        let error = PackedTensor::new(Format::Q4K, [2, 300], Bytes::new()).unwrap_err().to_string();
        assert_eq!(error, "a matrix of shape [2, 300] can't be q4_k, whose blocks have 256 values");
        let error = PackedTensor::new(Format::Q8_0, [2, 32], noise(67)).unwrap_err().to_string();
        assert_eq!(error, "shape [2, 32] of q8_0 needs 68 bytes, found 67");
        assert!(PackedTensor::new(Format::F32, [usize::MAX, 2], Bytes::new()).is_err());
        let fp8 = PackedTensor::new(Format::F8E4M3, [2, 3], noise(6)).unwrap();
        assert!(fp8.clone().with_row_scales(&[1.0]).is_err() && fp8.rows(1..3).is_err());
    }

    #[test]
    fn rows_keep_their_own_scales() {
        let fp8 = PackedTensor::new(Format::F8E4M3, [3, 2], vec![0x38; 6].into()).unwrap();
        let rows = fp8.with_row_scales(&[1.0, 2.0, 3.0]).unwrap().rows(1..3).unwrap().rows(1..2).unwrap();
        assert_eq!(rows.to_f32().unwrap().to_f32().unwrap().as_ref(), [3.0, 3.0]);
    }

    #[test]
    fn tiles_scale_their_rows_and_columns_also_in_slices() {
        // 1.0 everywhere, so that a value is its scale; the last tiles are partial.
        let (rows, cols) = (21, 40);
        let ones = PackedTensor::new(Format::F8E4M3, [rows, cols], vec![0x38; rows * cols].into()).unwrap();
        let scales = |count: usize, tile| TileScales { scales: (0..count).map(|i| i as f32).collect(), tile };
        let matrix = ones.clone().with_tile_scales(scales(9, [8, 16])).unwrap();
        assert!(ones.is_fp8() && !matrix.is_fp8());
        let expected = |row: usize, col: usize| (row / 8 * 3 + col / 16) as f32;
        let slice = matrix.rows(5..21).unwrap().rows(6..12).unwrap();
        for (from, count) in [(0, 40), (15, 2), (3, 30), (39, 1), (40, 0)] {
            let mut values = vec![0.0; count];
            slice.read(4, from, &mut values);
            assert_eq!(values, (from..from + count).map(|col| expected(15, col)).collect::<Vec<_>>());
        }
        let last =
            Scales::PerTile { scales: vec![3.0, 4.0, 5.0, 6.0, 7.0, 8.0], tile: [8, 16], first_row: 3 };
        assert_eq!(slice.scales(), last);
        assert!(ones.clone().with_tile_scales(scales(8, [8, 16])).is_err());
        assert!(ones.clone().with_tile_scales(scales(12, [8, 12])).is_err(), "columns of a tile");
        assert!(ones.with_tile_scales(scales(0, [0, 16])).is_err());
        let int8 = PackedTensor::new(Format::I8, [2, 8], vec![1; 16].into()).unwrap();
        assert!(int8.with_tile_scales(scales(1, [8, 16])).is_err());
    }

    #[test]
    fn a_patch_gets_rows_and_columns_of_the_whole_matrix() {
        #[derive(Debug)]
        struct AddPosition;
        impl Patch for AddPosition {
            fn apply(&self, row: usize, from: usize, values: &mut [f32]) {
                values.iter_mut().enumerate().for_each(|(i, v)| *v += (10 * row + from + i) as f32);
            }
        }
        let plain = PackedTensor::new(Format::F8E4M3, [3, 4], vec![0x38; 12].into()).unwrap();
        let matrix = plain.clone().with_scale(0.5).patched(Arc::new(AddPosition), 2, DType::F32);
        assert!(matrix.is_patched() && matrix != plain.with_scale(0.5) && matrix == matrix.clone());
        let slice = matrix.rows(1..3).unwrap();
        let mut values = [0.0; 2];
        slice.read(1, 2, &mut values);
        assert_eq!(values, [42.5, 43.5]);
        assert_eq!(slice.to_dense().unwrap().to_f32().unwrap()[..4], [30.5, 31.5, 32.5, 33.5]);
    }

    #[test]
    fn parallel_dequantization_equals_reading_rows() {
        let (rows, cols) = (5 * 41, 3 << 12);
        let matrix = PackedTensor::new(Format::F8E4M3, [rows, cols], noise(rows * cols)).unwrap();
        let (all, mut row) = (matrix.to_bf16().unwrap(), vec![0.0; cols]);
        let empty = PackedTensor::new(Format::Q8_0, [0, 1 << 50], Bytes::new()).unwrap();
        assert_eq!(empty.to_bf16().unwrap().numel(), 0);
        for i in [0, 102, 103, rows - 1] {
            matrix.read(i, 0, &mut row);
            assert_eq!(all.rows(i..i + 1).unwrap().to_f32().unwrap().as_ref(), row);
        }
    }

    #[test]
    fn both_orders_of_nibbles_and_scales_give_the_same_matrix() {
        let (rows, cols, blocks) = (200, 96, 6);
        let (data, plain) = (noise(rows * cols / 2), noise(rows * blocks));
        let swapped: Vec<u8> = data.iter().map(|b| b.rotate_left(4)).collect();
        let mut tiles = vec![0; 256 * 8];
        for (i, scale) in plain.iter().enumerate() {
            tiles[swizzled_index(i / blocks, i % blocks, blocks)] = *scale;
        }
        let make = |data: Bytes, scales: Bytes, other: bool| {
            let scales = BlockScales { scales, swizzled: other, high_first: other, global: 0.25 };
            PackedTensor::new(Format::NvFp4, [rows, cols], data).unwrap().with_block_scales(scales).unwrap()
        };
        let linear = make(data, plain, false);
        let tiled = make(swapped.into(), tiles.into(), true);
        assert_eq!(linear.to_f32().unwrap(), tiled.to_f32().unwrap());
        assert_eq!(linear.rows(150..151).unwrap().to_f32(), tiled.rows(150..151).unwrap().to_f32());
    }
}

//! Matrices whose values are packed: blocks of a few bits with scales of their own, or bytes with scales beside them.
//!
//! A backend keeps such a weight as it is and widens a piece of a row at a time ([`Packed::read`]) where it is multiplied.
//! This is the one place that knows what the bytes mean.
//!
//! ```
//! use kiln_tensor::packed::{Format, Packed};
//!
//! // d = 0.5 as a half, then 32 bytes.
//! let mut block = vec![0x00, 0x38];
//! block.extend((0..32u8).map(|q| q.wrapping_sub(16)));
//! let matrix = Packed::new(Format::Q8_0, [1, 32], block.into())?;
//! let mut values = [0.0; 3];
//! matrix.read(0, 15, &mut values);
//! assert_eq!(values, [-0.5, 0.0, 0.5]);
//! # Ok::<(), kiln_tensor::Error>(())
//! ```

mod blocks;
mod change;
mod format;
mod k_blocks;
pub mod small_floats;

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use half::bf16;

use crate::{DType, Error, HostTensor, Result, Shape};
pub use change::Change;
use change::Changed;
pub use format::Format;
use small_floats::{E2M1, from_e4m3, from_e5m2, half};

/// A packed matrix. The bytes are shared: cloning and taking rows copy nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    format: Format,
    shape: Shape,
    data: Bytes,
    scale: Scale,
    change: Option<Changed>,
}

/// What the stored numbers are multiplied with.
#[derive(Clone, Debug, PartialEq)]
enum Scale {
    One,
    All(f32),
    /// One a row, from row `.1` on.
    Rows(Arc<[f32]>, usize),
    /// One for 16 columns, of a matrix that this one is cut out of, from row `.1` on.
    Blocks(BlockScales, usize),
}

/// The scales of a matrix of 4-bit floats (nvfp4).
#[derive(Clone, Debug, PartialEq)]
pub struct BlockScales {
    /// 8-bit floats (e4m3), one for 16 columns.
    pub scales: Bytes,
    /// Whether they lie in tiles of 128 rows by 4 scales, as the tensor cores read them, rows and scales rounded up.
    pub swizzled: bool,
    /// Whether the first of two values is in the high half of their byte.
    pub high_first: bool,
    /// The factor of the whole matrix.
    pub all: f32,
}

/// [`Packed::factors`]: what the stored numbers are multiplied with, plainly laid out.
#[derive(Clone, Debug, PartialEq)]
pub enum Factors {
    /// One for all of them.
    All(f32),
    /// One a row.
    Rows(Vec<f32>),
    /// One for 16 columns and one for all of them.
    Blocks {
        /// The factor of the whole matrix.
        all: f32,
        /// 8-bit floats (e4m3), row by row.
        scales: Vec<u8>,
        /// Whether the first of two values is in the high half of their byte.
        high_first: bool,
    },
}

impl BlockScales {
    /// How many there are for a matrix of this size.
    pub fn count(&self, [rows, cols]: [usize; 2]) -> Option<usize> {
        let across = cols.div_ceil(16);
        match self.swizzled {
            true => rows.checked_next_multiple_of(128)?.checked_mul(across.checked_next_multiple_of(4)?),
            false => rows.checked_mul(across),
        }
    }

    /// Where the scale of `block` of `row` lies, `across` of them beside each other.
    #[inline(always)]
    fn place(&self, row: usize, block: usize, across: usize) -> usize {
        match self.swizzled {
            true => swizzled(row, block, across),
            false => row * across + block,
        }
    }
}

/// Where the scale of `block` of `row` lies in tiles of 128 rows by 4 scales, `across` of them beside each other.
#[inline(always)]
pub fn swizzled(row: usize, block: usize, across: usize) -> usize {
    let tile = row / 128 * across.div_ceil(4) + block / 4;
    tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
}

impl Packed {
    /// A matrix of `[rows, cols]` over exactly the bytes it needs; its columns must fill whole blocks.
    pub fn new(format: Format, shape: impl Into<Shape>, data: Bytes) -> Result<Packed> {
        let shape = shape.into();
        let &[rows, cols] = shape.dims() else { return Err(Error::Blocks { format, shape }) };
        let row = format.row_bytes(cols).ok_or_else(|| Error::Blocks { format, shape: shape.clone() })?;
        let expected = row.checked_mul(rows).ok_or_else(|| Error::TooLarge(shape.clone()))?;
        if data.len() != expected {
            return Err(Error::PackedLength { shape, format, expected, found: data.len() });
        }
        Ok(Packed { format, shape, data, scale: Scale::One, change: None })
    }

    /// The same with all values times `scale`.
    pub fn scaled(self, scale: f32) -> Packed {
        Packed { scale: Scale::All(scale), ..self }
    }

    /// The same with the values of each row times its scale.
    pub fn scaled_rows(self, scales: &[f32]) -> Result<Packed> {
        match scales.len() == self.row_count() {
            true => Ok(Packed { scale: Scale::Rows(scales.into(), 0), ..self }),
            false => Err(Error::Scales { shape: self.shape, found: scales.len() }),
        }
    }

    /// The same with scales for 16 columns each.
    pub fn scaled_blocks(self, scales: BlockScales) -> Result<Packed> {
        let (rows, cols, found) = (self.row_count(), self.cols(), scales.scales.len());
        match scales.count([rows, cols]) == Some(found) && self.format == Format::NvFp4 {
            true => Ok(Packed { scale: Scale::Blocks(scales, 0), ..self }),
            false => Err(Error::Scales { shape: self.shape, found }),
        }
    }

    /// The same with its values changed where they are read, instead of any change before. Its first row is row `first` of
    /// the change; written out, the values are of type `dtype`, f32 or bf16.
    pub fn changed(self, change: Arc<dyn Change>, first: usize, dtype: DType) -> Packed {
        Packed { change: Some(Changed { change, first, dtype }), ..self }
    }

    /// Whether the values are others than the bytes say.
    pub fn is_changed(&self) -> bool {
        self.change.is_some()
    }

    /// Whether the bytes are 8-bit floats (e4m3) with no more than a factor a row: what a product in such floats takes.
    pub fn is_fp8(&self) -> bool {
        self.format == Format::F8E4M3 && !self.is_changed()
    }

    /// A dense matrix in this type, sharing its bytes; f64 becomes f32.
    pub fn from_dense(dense: &HostTensor) -> Result<Packed> {
        let (format, dense) = match dense.dtype() {
            DType::F32 => (Format::F32, dense.clone()),
            DType::BF16 => (Format::BF16, dense.clone()),
            DType::F16 => (Format::F16, dense.clone()),
            DType::F8E4M3 => (Format::F8E4M3, dense.clone()),
            DType::F8E5M2 => (Format::F8E5M2, dense.clone()),
            _ => (Format::F32, dense.to_dtype(DType::F32)?),
        };
        Packed::new(format, dense.shape(), dense.bytes().clone())
    }

    /// How its values are stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// `[rows, cols]`.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The bytes without the scales that lie beside them.
    pub fn bytes(&self) -> &Bytes {
        &self.data
    }

    /// How many rows there are.
    pub fn row_count(&self) -> usize {
        self.shape.rows()
    }

    /// How many columns there are.
    pub fn cols(&self) -> usize {
        self.shape.last()
    }

    /// The factor that all values share, where there is one.
    pub fn scale(&self) -> Option<f32> {
        match &self.scale {
            Scale::All(scale) => Some(*scale),
            Scale::Blocks(scales, _) => Some(scales.all),
            _ => None,
        }
    }

    /// The factor of every row, where they are not in the blocks.
    pub fn row_scales(&self) -> Vec<f32> {
        match &self.scale {
            Scale::Rows(scales, first) => scales[*first..first + self.row_count()].to_vec(),
            _ => vec![self.scale().unwrap_or(1.0); self.row_count()],
        }
    }

    /// What the stored numbers are multiplied with, for a backend that reads them by itself.
    pub fn factors(&self) -> Factors {
        match &self.scale {
            Scale::One => Factors::All(1.0),
            Scale::All(scale) => Factors::All(*scale),
            Scale::Rows(..) => Factors::Rows(self.row_scales()),
            Scale::Blocks(scales, first) => {
                let (rows, across) = (*first..first + self.row_count(), self.cols() / 16);
                let places = rows.flat_map(|row| (0..across).map(move |block| (row, block)));
                let bytes = places.map(|(row, block)| scales.scales[scales.place(row, block, across)]);
                Factors::Blocks { all: scales.all, scales: bytes.collect(), high_first: scales.high_first }
            }
        }
    }

    /// Some of the rows, sharing the bytes.
    pub fn rows(&self, range: Range<usize>) -> Result<Packed> {
        let rows = self.row_count();
        if range.start > range.end || range.end > rows {
            return Err(Error::Rows { start: range.start, end: range.end, shape: self.shape.clone() });
        }
        let row = self.data.len() / rows.max(1);
        let scale = match &self.scale {
            Scale::Rows(scales, first) => Scale::Rows(Arc::clone(scales), first + range.start),
            Scale::Blocks(scales, first) => Scale::Blocks(scales.clone(), first + range.start),
            other => other.clone(),
        };
        let data = self.data.slice(range.start * row..range.end * row);
        let change = self.change.clone().map(|c| Changed { first: c.first + range.start, ..c });
        Ok(Packed { format: self.format, shape: [range.len(), self.cols()].into(), data, scale, change })
    }

    /// Writes the values of `row` from column `from` on, as many as `out` has room for.
    ///
    /// # Panics
    /// When they are not all inside the matrix.
    // Always inlined: a kernel compiled for better instructions than this crate decodes with those.
    #[inline(always)]
    pub fn read(&self, row: usize, from: usize, out: &mut [f32]) {
        let stride = self.data.len() / self.row_count();
        let bytes = &self.data[row * stride..][..stride];
        match self.format {
            Format::F32 => single(bytes, from, out, f32::from_le_bytes),
            Format::BF16 => {
                single(bytes, from, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))
            }
            Format::F16 => single(bytes, from, out, half),
            Format::F8E4M3 => single(bytes, from, out, |[b]| from_e4m3(b)),
            Format::F8E5M2 => single(bytes, from, out, |[b]| from_e5m2(b)),
            Format::Q4_0 => whole(bytes, from, out, |_, b, out| blocks::q4_0(b, out)),
            Format::Q4_1 => whole(bytes, from, out, |_, b, out| blocks::q4_1(b, out)),
            Format::Q5_0 => whole(bytes, from, out, |_, b, out| blocks::q5_0(b, out)),
            Format::Q5_1 => whole(bytes, from, out, |_, b, out| blocks::q5_1(b, out)),
            Format::Q8_0 => whole(bytes, from, out, |_, b, out| blocks::q8_0(b, out)),
            Format::Q2K => whole(bytes, from, out, |_, b, out| k_blocks::q2_k(b, out)),
            Format::Q3K => whole(bytes, from, out, |_, b, out| k_blocks::q3_k(b, out)),
            Format::Q4K => whole(bytes, from, out, |_, b, out| k_blocks::q4_k(b, out)),
            Format::Q5K => whole(bytes, from, out, |_, b, out| k_blocks::q5_k(b, out)),
            Format::Q6K => whole(bytes, from, out, |_, b, out| k_blocks::q6_k(b, out)),
            Format::NvFp4 => self.fours(bytes, row, from, out),
        }
        match &self.scale {
            Scale::All(scale) => out.iter_mut().for_each(|v| *v *= scale),
            Scale::Rows(scales, first) => {
                let scale = scales[first + row];
                out.iter_mut().for_each(|v| *v *= scale);
            }
            // The scales of blocks were taken with their values.
            Scale::One | Scale::Blocks(..) => {}
        }
        if let Some(Changed { change, first, .. }) = &self.change {
            change.change(first + row, from, out);
        }
    }

    #[inline(always)]
    fn fours(&self, bytes: &[u8], row: usize, from: usize, out: &mut [f32]) {
        let across = self.cols() / 16;
        let (high_first, scale) = match &self.scale {
            Scale::Blocks(scales, first) => (scales.high_first, Some((scales, first + row))),
            _ => (false, None),
        };
        whole(bytes, from, out, |block, bytes: &[u8; 8], out: &mut [f32; 16]| {
            let scale =
                scale.map_or(1.0, |(s, row)| from_e4m3(s.scales[s.place(row, block, across)]) * s.all);
            for (out, &byte) in out.chunks_exact_mut(2).zip(bytes) {
                let [low, high] = [byte & 15, byte >> 4].map(|code| E2M1[usize::from(code)] * scale);
                out.copy_from_slice(&if high_first { [high, low] } else { [low, high] });
            }
        });
    }

    /// All values as f32.
    pub fn to_f32(&self) -> Result<HostTensor> {
        HostTensor::from_f32(&self.shape, self.values(|v| v))
    }

    /// All values, rounded to bf16.
    pub fn to_bf16(&self) -> Result<HostTensor> {
        HostTensor::from_bf16(&self.shape, self.values(bf16::from_f32))
    }

    /// All values, in their [`dense_dtype`](Packed::dense_dtype).
    pub fn to_dense(&self) -> Result<HostTensor> {
        match self.dense_dtype() {
            DType::F32 => self.to_f32(),
            _ => self.to_bf16(),
        }
    }

    /// What its values become outside of their format: bf16, unless they are stored or were changed as f32.
    pub fn dense_dtype(&self) -> DType {
        match (&self.change, self.format) {
            (Some(Changed { dtype: DType::F32, .. }), _) | (None, Format::F32) => DType::F32,
            _ => DType::BF16,
        }
    }

    /// All values, by as many threads as there are cores: each row by itself, so that their number changes nothing.
    fn values<T: Copy + Default + Send>(&self, to: impl Fn(f32) -> T + Copy + Sync) -> Vec<T> {
        let cols = self.cols();
        let mut values = vec![T::default(); self.shape.numel()];
        // Without rows, columns may be beyond counting.
        if values.is_empty() {
            return values;
        }
        let fill = |first: usize, values: &mut [T]| {
            let mut row_values = vec![0f32; cols];
            for (row, out) in values.chunks_exact_mut(cols).enumerate() {
                self.read(first + row, 0, &mut row_values);
                out.iter_mut().zip(&row_values).for_each(|(out, v)| *out = to(*v));
            }
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(values.len().div_ceil(WORTH_A_THREAD));
        if threads < 2 {
            fill(0, &mut values);
            return values;
        }
        let rows = self.row_count().div_ceil(threads);
        thread::scope(|scope| {
            for (i, piece) in values.chunks_mut(rows * cols).enumerate() {
                scope.spawn(move || fill(i * rows, piece));
            }
        });
        values
    }
}

/// Values below which another thread costs more than it brings.
const WORTH_A_THREAD: usize = 1 << 20;

/// Values of `B` bytes each.
#[inline(always)]
fn single<const B: usize>(row: &[u8], from: usize, out: &mut [f32], value: impl Fn([u8; B]) -> f32) {
    let (values, _) = row[from * B..][..out.len() * B].as_chunks::<B>();
    for (out, bytes) in out.iter_mut().zip(values) {
        *out = value(*bytes);
    }
}

/// Blocks of `B` bytes and `N` values, the first and the last perhaps in part.
#[inline(always)]
fn whole<const B: usize, const N: usize>(
    row: &[u8],
    from: usize,
    out: &mut [f32],
    decode: impl Fn(usize, &[u8; B], &mut [f32; N]),
) {
    let (blocks, _) = row.as_chunks::<B>();
    let part = |block: usize, skip: usize, out: &mut [f32]| {
        let mut values = [0.0; N];
        decode(block, &blocks[block], &mut values);
        out.copy_from_slice(&values[skip..skip + out.len()]);
    };
    let (mut block, skip) = (from / N, from % N);
    let lead = if skip == 0 { 0 } else { out.len().min(N - skip) };
    let (first, out) = out.split_at_mut(lead);
    if !first.is_empty() {
        part(block, skip, first);
        block += 1;
    }
    let (middle, last) = out.as_chunks_mut::<N>();
    for out in middle {
        decode(block, &blocks[block], out);
        block += 1;
    }
    if !last.is_empty() {
        part(block, 0, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes without a pattern; halves among them may be anything but infinite.
    fn noise(count: usize) -> Bytes {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8 & 0xbb
        };
        (0..count).map(|_| next()).collect::<Vec<u8>>().into()
    }

    #[test]
    fn any_piece_of_a_row_has_the_values_of_the_whole_row() {
        for format in Format::all() {
            let (rows, cols) = (3, 512);
            let data = noise(rows * format.row_bytes(cols).unwrap());
            let mut matrix = Packed::new(format, [rows, cols], data).unwrap();
            if format == Format::NvFp4 {
                let scales =
                    BlockScales { scales: noise(128 * 32), swizzled: true, high_first: true, all: 0.5 };
                matrix = matrix.scaled_blocks(scales).unwrap();
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
    fn sizes_must_fit() {
        let error = Packed::new(Format::Q4K, [2, 300], Bytes::new()).unwrap_err().to_string();
        assert_eq!(error, "a matrix of shape [2, 300] can't be q4_k, whose blocks have 256 values");
        let error = Packed::new(Format::Q8_0, [2, 32], noise(67)).unwrap_err().to_string();
        assert_eq!(error, "shape [2, 32] of q8_0 needs 68 bytes, found 67");
        assert!(Packed::new(Format::F32, [usize::MAX, 2], Bytes::new()).is_err());
        let fp8 = Packed::new(Format::F8E4M3, [2, 3], noise(6)).unwrap();
        assert!(fp8.clone().scaled_rows(&[1.0]).is_err() && fp8.rows(1..3).is_err());
    }

    #[test]
    fn rows_keep_their_own_scales() {
        let fp8 = Packed::new(Format::F8E4M3, [3, 2], vec![0x38; 6].into()).unwrap();
        let rows = fp8.scaled_rows(&[1.0, 2.0, 3.0]).unwrap().rows(1..3).unwrap().rows(1..2).unwrap();
        assert_eq!(rows.to_f32().unwrap().to_f32().unwrap().as_ref(), [3.0, 3.0]);
    }

    #[test]
    fn a_change_sees_the_rows_and_columns_of_the_whole_matrix() {
        #[derive(Debug)]
        struct Place;
        impl Change for Place {
            fn change(&self, row: usize, from: usize, values: &mut [f32]) {
                values.iter_mut().enumerate().for_each(|(i, v)| *v += (10 * row + from + i) as f32);
            }
        }
        let plain = Packed::new(Format::F8E4M3, [3, 4], vec![0x38; 12].into()).unwrap();
        let matrix = plain.clone().scaled(0.5).changed(Arc::new(Place), 2, DType::F32);
        assert!(matrix.is_changed() && matrix != plain.scaled(0.5) && matrix == matrix.clone());
        let part = matrix.rows(1..3).unwrap();
        let mut values = [0.0; 2];
        part.read(1, 2, &mut values);
        assert_eq!(values, [42.5, 43.5]);
        assert_eq!(part.to_dense().unwrap().to_f32().unwrap()[..4], [30.5, 31.5, 32.5, 33.5]);
    }

    #[test]
    fn many_threads_write_out_what_one_reads() {
        let (rows, cols) = (5 * 41, 3 << 12);
        let matrix = Packed::new(Format::F8E4M3, [rows, cols], noise(rows * cols)).unwrap();
        let (all, mut row) = (matrix.to_bf16().unwrap(), vec![0.0; cols]);
        let empty = Packed::new(Format::Q8_0, [0, 1 << 50], Bytes::new()).unwrap();
        assert_eq!(empty.to_bf16().unwrap().numel(), 0);
        for i in [0, 102, 103, rows - 1] {
            matrix.read(i, 0, &mut row);
            assert_eq!(all.rows(i..i + 1).unwrap().to_f32().unwrap().as_ref(), row);
        }
    }

    #[test]
    fn both_orders_of_nibbles_and_scales_give_the_same_matrix() {
        let (rows, cols, across) = (200, 96, 6);
        let (data, plain) = (noise(rows * cols / 2), noise(rows * across));
        let swapped: Vec<u8> = data.iter().map(|b| b.rotate_left(4)).collect();
        let mut tiles = vec![0; 256 * 8];
        for (i, scale) in plain.iter().enumerate() {
            tiles[swizzled(i / across, i % across, across)] = *scale;
        }
        let make = |data: Bytes, scales: Bytes, other: bool| {
            let scales = BlockScales { scales, swizzled: other, high_first: other, all: 0.25 };
            Packed::new(Format::NvFp4, [rows, cols], data).unwrap().scaled_blocks(scales).unwrap()
        };
        let linear = make(data, plain, false);
        let tiled = make(swapped.into(), tiles.into(), true);
        assert_eq!(linear.to_f32().unwrap(), tiled.to_f32().unwrap());
        assert_eq!(linear.rows(150..151).unwrap().to_f32(), tiled.rows(150..151).unwrap().to_f32());
    }
}

//! Dequantizing pieces of rows.

use super::patch::AppliedPatch;
use super::scales::{BLOCK_COLS, SharedScales};
use super::small_floats::{E2M1, from_e4m3, from_e5m2, half};
use super::{Format, PackedTensor, blocks, k_blocks};

impl PackedTensor {
    /// Dequantizes `out.len()` values of `row`, from column `from` on.
    ///
    /// # Panics
    /// If the range is not inside the matrix.
    // Always inlined, so that a kernel compiled for a newer instruction set decodes with it too.
    #[inline(always)]
    pub fn read(&self, row: usize, from: usize, out: &mut [f32]) {
        let stride = self.data.len() / self.row_count();
        let bytes = &self.data[row * stride..][..stride];
        match self.format {
            Format::F32 => read_values(bytes, from, out, f32::from_le_bytes),
            Format::BF16 => {
                read_values(bytes, from, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))
            }
            Format::F16 => read_values(bytes, from, out, half),
            Format::F8E4M3 => read_values(bytes, from, out, |[b]| from_e4m3(b)),
            Format::F8E5M2 => read_values(bytes, from, out, |[b]| from_e5m2(b)),
            Format::I8 => read_values(bytes, from, out, |[b]| f32::from(b as i8)),
            Format::Q4_0 => read_blocks(bytes, from, out, |_, b, out| blocks::q4_0(b, out)),
            Format::Q4_1 => read_blocks(bytes, from, out, |_, b, out| blocks::q4_1(b, out)),
            Format::Q5_0 => read_blocks(bytes, from, out, |_, b, out| blocks::q5_0(b, out)),
            Format::Q5_1 => read_blocks(bytes, from, out, |_, b, out| blocks::q5_1(b, out)),
            Format::Q8_0 => read_blocks(bytes, from, out, |_, b, out| blocks::q8_0(b, out)),
            Format::Q2K => read_blocks(bytes, from, out, |_, b, out| k_blocks::q2_k(b, out)),
            Format::Q3K => read_blocks(bytes, from, out, |_, b, out| k_blocks::q3_k(b, out)),
            Format::Q4K => read_blocks(bytes, from, out, |_, b, out| k_blocks::q4_k(b, out)),
            Format::Q5K => read_blocks(bytes, from, out, |_, b, out| k_blocks::q5_k(b, out)),
            Format::Q6K => read_blocks(bytes, from, out, |_, b, out| k_blocks::q6_k(b, out)),
            Format::Iq4Nl => read_blocks(bytes, from, out, |_, b, out| blocks::iq4_nl(b, out)),
            Format::Iq4Xs => read_blocks(bytes, from, out, |_, b, out| k_blocks::iq4_xs(b, out)),
            Format::NvFp4 => self.read_nvfp4(bytes, row, from, out),
        }
        match &self.scales {
            SharedScales::PerTensor(scale) => out.iter_mut().for_each(|v| *v *= scale),
            SharedScales::PerRow { scales, first_row } => {
                let scale = scales[first_row + row];
                out.iter_mut().for_each(|v| *v *= scale);
            }
            SharedScales::PerTile { scales, first_row } => {
                scales.apply(first_row + row, from, self.cols(), out);
            }
            // Block scales are applied by `read_nvfp4`.
            SharedScales::None | SharedScales::PerBlock { .. } => {}
        }
        if let Some(AppliedPatch { patch, first_row, .. }) = &self.patch {
            patch.apply(first_row + row, from, out);
        }
    }

    /// [`PackedTensor::read`] for all but kernels: compiled once, here.
    #[inline(never)]
    pub fn decode(&self, row: usize, from: usize, out: &mut [f32]) {
        self.read(row, from, out);
    }

    #[inline(always)]
    fn read_nvfp4(&self, bytes: &[u8], row: usize, from: usize, out: &mut [f32]) {
        let blocks = self.cols() / BLOCK_COLS;
        let (high_first, scales) = match &self.scales {
            SharedScales::PerBlock { scales, first_row } => {
                (scales.high_first, Some((scales, first_row + row)))
            }
            _ => (false, None),
        };
        read_blocks(bytes, from, out, |block, bytes: &[u8; 8], out: &mut [f32; BLOCK_COLS]| {
            let scale = scales.map_or(1.0, |(s, row)| from_e4m3(s.get(row, block, blocks)) * s.global);
            for (out, &byte) in out.chunks_exact_mut(2).zip(bytes) {
                let [low, high] = [byte & 15, byte >> 4].map(|code| E2M1[usize::from(code)] * scale);
                out.copy_from_slice(&if high_first { [high, low] } else { [low, high] });
            }
        });
    }
}

/// The stacked rows of matrices, which may differ in format.
pub struct StackedRows(pub Vec<PackedTensor>);

impl StackedRows {
    /// The number of rows.
    pub fn count(&self) -> usize {
        self.0.iter().map(PackedTensor::row_count).sum()
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.0.first().map_or(0, PackedTensor::cols)
    }

    /// Decodes a whole row.
    pub fn decode(&self, mut row: usize, out: &mut [f32]) {
        for matrix in &self.0 {
            if row < matrix.row_count() {
                return matrix.decode(row, 0, out);
            }
            row -= matrix.row_count();
        }
    }
}

/// Decodes values of `B` bytes each.
#[inline(always)]
fn read_values<const B: usize>(row: &[u8], from: usize, out: &mut [f32], decode: impl Fn([u8; B]) -> f32) {
    let (values, _) = row[from * B..][..out.len() * B].as_chunks::<B>();
    for (out, bytes) in out.iter_mut().zip(values) {
        *out = decode(*bytes);
    }
}

/// Decodes blocks of `B` bytes and `N` values; the first and the last block may be partial. `decode` gets the block's
/// index.
#[inline(always)]
fn read_blocks<const B: usize, const N: usize>(
    row: &[u8],
    from: usize,
    out: &mut [f32],
    decode: impl Fn(usize, &[u8; B], &mut [f32; N]),
) {
    let (blocks, _) = row.as_chunks::<B>();
    let decode_partial = |block: usize, skip: usize, out: &mut [f32]| {
        let mut values = [0.0; N];
        decode(block, &blocks[block], &mut values);
        out.copy_from_slice(&values[skip..skip + out.len()]);
    };
    let (mut block, skip) = (from / N, from % N);
    let first_len = if skip == 0 { 0 } else { out.len().min(N - skip) };
    let (first, out) = out.split_at_mut(first_len);
    if !first.is_empty() {
        decode_partial(block, skip, first);
        block += 1;
    }
    let (middle, last) = out.as_chunks_mut::<N>();
    for out in middle {
        decode(block, &blocks[block], out);
        block += 1;
    }
    if !last.is_empty() {
        decode_partial(block, 0, last);
    }
}

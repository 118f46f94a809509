//! The rows of a host matrix in the layout that kernels read (`weights.wgsl`): each starts at a word, with scales of its own behind
//! its values.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use kiln_ops::{Error, Result};
use kiln_tensor::packed::{BLOCK_COLS, Format, PackedTensor, Scales};
use kiln_tensor::{DType, HostTensor};

/// The rows of a matrix, not copied until they are needed.
pub(crate) struct WeightRows {
    /// The format, as `weights.wgsl` names it.
    pub format: &'static str,
    pub count: usize,
    /// Words from one row to the next.
    pub stride: usize,
    /// Columns that share a scale, for fp8 in tiles.
    pub tile: usize,
    bytes: Bytes,
    /// Bytes of a row's values.
    row_bytes: usize,
    /// What follows the values of the rows.
    behind: Behind,
}

/// A row's own scales.
enum Behind {
    None,
    /// f32 scales of tiles.
    Tiles {
        scales: Vec<f32>,
        tile: [usize; 2],
        first_row: usize,
        across: usize,
    },
    /// e4m3 scales of blocks of 16, and whether the first of two values is in the high nibble of their byte.
    Blocks {
        scales: Vec<u8>,
        blocks: usize,
        high_first: bool,
    },
}

impl WeightRows {
    /// A dense matrix.
    pub fn dense(matrix: &HostTensor) -> Result<WeightRows> {
        let (format, matrix) = match matrix.dtype() {
            DType::BF16 => ("bf16", matrix.clone()),
            DType::F16 => ("f16", matrix.clone()),
            _ => ("f32", matrix.to_dtype(DType::F32)?),
        };
        Ok(WeightRows::plain(format, &matrix))
    }

    /// A matrix of integers, whose rows have scales elsewhere.
    pub fn int8(matrix: &HostTensor) -> WeightRows {
        WeightRows::plain("int8", matrix)
    }

    fn plain(format: &'static str, matrix: &HostTensor) -> WeightRows {
        let row_bytes = matrix.shape().last() * matrix.dtype().size();
        let count = matrix.shape().rows();
        WeightRows::new(format, count, row_bytes, matrix.bytes().clone(), Behind::None)
    }

    fn new(format: &'static str, count: usize, row_bytes: usize, bytes: Bytes, behind: Behind) -> WeightRows {
        let (after, tile) = match &behind {
            Behind::None => (0, 1),
            Behind::Tiles { tile, across, .. } => (4 * across, tile[1]),
            Behind::Blocks { blocks, .. } => (*blocks, 1),
        };
        // Scales of tiles are words; those of blocks follow at once.
        let stride = match behind {
            Behind::Blocks { .. } => (row_bytes + after).div_ceil(4),
            _ => row_bytes.div_ceil(4) + after.div_ceil(4),
        };
        WeightRows { format, count, stride, tile, bytes, row_bytes, behind }
    }

    /// A packed matrix, without the scales of its rows. Patched values are decoded: only the CPU applies patches.
    pub fn packed(matrix: &PackedTensor) -> Result<WeightRows> {
        if matrix.is_patched() {
            return WeightRows::dense(&matrix.to_dense()?);
        }
        let (count, cols) = (matrix.row_count(), matrix.cols());
        let format = matrix.format();
        let row_bytes = format
            .row_bytes(cols)
            .ok_or_else(|| kiln_tensor::Error::Blocks { format, shape: matrix.shape().clone() })?;
        let behind = match (format, matrix.scales()) {
            (_, Scales::PerTile { scales, tile, first_row }) => {
                Behind::Tiles { scales, tile, first_row, across: cols.div_ceil(tile[1]) }
            }
            (Format::NvFp4, Scales::PerBlock { scales, high_first, .. }) => {
                Behind::Blocks { scales, blocks: cols / BLOCK_COLS, high_first }
            }
            // Without scales, they are 1.
            (Format::NvFp4, _) => {
                let blocks = cols / BLOCK_COLS;
                Behind::Blocks { scales: vec![E4M3_ONE; count * blocks], blocks, high_first: false }
            }
            _ => Behind::None,
        };
        let tiled = matches!(behind, Behind::Tiles { .. });
        let name = format_name(format, tiled);
        Ok(WeightRows::new(name, count, row_bytes, matrix.bytes().clone(), behind))
    }

    /// Some rows as the device has them: the stored bytes, if they need no change.
    pub fn bytes(&self, rows: Range<usize>) -> Result<Cow<'_, [u8]>> {
        let stored = self.bytes.get(rows.start * self.row_bytes..rows.end * self.row_bytes);
        let stored = stored.ok_or_else(|| Error::Arguments {
            op: "load_weight",
            what: format!("the weight has no rows {}..{}", rows.start, rows.end),
        })?;
        let width = 4 * self.stride;
        if width == self.row_bytes {
            return Ok(Cow::Borrowed(stored));
        }
        let mut all = vec![0; rows.len() * width];
        for ((row, stored), out) in
            rows.zip(stored.chunks_exact(self.row_bytes)).zip(all.chunks_exact_mut(width))
        {
            let (values, behind) = out.split_at_mut(self.row_bytes);
            values.copy_from_slice(stored);
            match &self.behind {
                Behind::None => {}
                Behind::Tiles { scales, tile, first_row, across } => {
                    let of_row = &scales[(first_row + row) / tile[0] * across..][..*across];
                    let behind = &mut behind[self.row_bytes.next_multiple_of(4) - self.row_bytes..];
                    behind.copy_from_slice(bytemuck::cast_slice(of_row));
                }
                Behind::Blocks { scales, blocks, high_first } => {
                    behind[..*blocks].copy_from_slice(&scales[row * blocks..][..*blocks]);
                    if *high_first {
                        values.iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
                    }
                }
            }
        }
        Ok(Cow::Owned(all))
    }
}

/// 1 as an e4m3.
const E4M3_ONE: u8 = 0x38;

fn format_name(format: Format, tiled: bool) -> &'static str {
    match format {
        Format::F8E4M3 if tiled => "f8_e4m3_tiles",
        Format::F8E5M2 if tiled => "f8_e5m2_tiles",
        other => other.name(),
    }
}

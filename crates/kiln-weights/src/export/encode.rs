//! Rows of floats in any format, by several threads.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use kiln_base::lock;
use kiln_tensor::packed::small_floats::{from_e4m3, to_e2m1, to_e4m3};
use kiln_tensor::packed::{BlockScales, Format, Packed, swizzled};
use kiln_tensor::{Error, Result, bf16, f16};

use super::{blocks, k_blocks, lanes};

/// The largest 8-bit and 4-bit floats.
const LARGEST_E4M3: f32 = 448.0;
const LARGEST_E2M1: f32 = 6.0;

/// A matrix in another format.
pub(super) struct Encoded {
    pub matrix: Packed,
    /// Scales of 4-bit floats, one for 16 columns, in tiles.
    pub blocks: Option<Vec<u8>>,
    /// The factor of the whole.
    pub scale: Option<f32>,
    /// Sums of the squared errors and of the squared values.
    pub squares: [f64; 2],
}

/// Rows of a matrix whose parts may lie apart and be stored differently.
pub(super) struct Rows<'a>(pub &'a [Packed]);

impl Rows<'_> {
    pub fn count(&self) -> usize {
        self.0.iter().map(Packed::row_count).sum()
    }

    pub fn cols(&self) -> usize {
        self.0.first().map_or(0, Packed::cols)
    }

    fn read(&self, mut row: usize, out: &mut [f32]) {
        for part in self.0 {
            if row < part.row_count() {
                return part.read(row, 0, out);
            }
            row -= part.row_count();
        }
    }
}

/// Rows that a thread takes at a time.
const ROWS_AT_ONCE: usize = 32;

/// Encodes the rows, each of whole blocks; with `judge`, sums up what was lost.
pub(super) fn encode(rows: &Rows<'_>, format: Format, threads: usize, judge: bool) -> Result<Encoded> {
    let (count, cols) = (rows.count(), rows.cols());
    let scale = match format {
        Format::F8E4M3 => Some(factor(largest(rows, threads), LARGEST_E4M3)),
        Format::NvFp4 => Some(factor(largest(rows, threads), LARGEST_E4M3 * LARGEST_E2M1)),
        _ => None,
    };
    let row_bytes =
        format.row_bytes(cols).ok_or_else(|| Error::Blocks { format, shape: [count, cols].into() })?;
    // Written in place: a second copy would be as large as the tensor.
    let mut bytes = vec![0u8; count * row_bytes];
    let slices: Vec<_> = bytes.chunks_mut((ROWS_AT_ONCE * row_bytes).max(1)).map(Mutex::new).collect();
    let scales = in_pieces(count, threads, |range| {
        let (mut row, mut encoded, mut scales) = (vec![0f32; cols], Vec::new(), Vec::new());
        let slice = slices.get(range.start / ROWS_AT_ONCE);
        for i in range {
            rows.read(i, &mut row);
            match (format, scale) {
                (Format::NvFp4, Some(scale)) => fours(&row, scale, &mut encoded, &mut scales),
                (Format::F8E4M3, Some(scale)) => encoded.extend(row.iter().map(|x| to_e4m3(x / scale))),
                _ => encode_row(&row, format, &mut encoded),
            }
        }
        if let Some(slice) = slice {
            // Nobody else has this piece; a lock is how to say so without `unsafe`.
            lock(&slice).copy_from_slice(&encoded);
        }
        scales
    });
    drop(slices);
    let mut matrix = Packed::new(format, [count, cols], bytes.into())?;
    let mut blocks = None;
    if let Some(scale) = scale {
        matrix = match format {
            Format::NvFp4 => {
                let tiles = in_tiles(&scales.concat(), cols / 16, count);
                blocks = Some(tiles.clone());
                let scales =
                    BlockScales { scales: tiles.into(), swizzled: true, high_first: true, all: scale };
                matrix.scaled_blocks(scales)?
            }
            _ => matrix.scaled(scale),
        };
    }
    let squares = if judge { compare(rows, &matrix, threads) } else { [0.0; 2] };
    Ok(Encoded { matrix, blocks, scale, squares })
}

fn encode_row(row: &[f32], format: Format, out: &mut Vec<u8>) {
    let each = |encode: fn(&[f32], &mut Vec<u8>), out: &mut Vec<u8>| {
        row.chunks_exact(format.block_values()).for_each(|block| encode(block, out));
    };
    match format {
        Format::F32 => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
        Format::BF16 => out.extend(row.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        Format::F16 => out.extend(row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        Format::Q4_0 => each(blocks::q4_0, out),
        Format::Q4_1 => each(blocks::q4_1, out),
        Format::Q5_0 => each(blocks::q5_0, out),
        Format::Q5_1 => each(blocks::q5_1, out),
        Format::Q8_0 => each(blocks::q8_0, out),
        Format::Q2K => each(k_blocks::q2_k, out),
        Format::Q3K => each(k_blocks::q3_k, out),
        Format::Q4K => each(k_blocks::q4_k, out),
        Format::Q5K => each(k_blocks::q5_k, out),
        Format::Q6K => each(k_blocks::q6_k, out),
        Format::F8E4M3 | Format::F8E5M2 | Format::NvFp4 => unreachable!("these have scales beside them"),
    }
}

/// What 1 stands for when `largest` is the largest code.
fn factor(largest: f32, code: f32) -> f32 {
    if largest > 0.0 { largest / code } else { 1.0 }
}

/// 4-bit floats, the first of a pair in the high half, and a scale for 16 of them.
fn fours(row: &[f32], all: f32, out: &mut Vec<u8>, scales: &mut Vec<u8>) {
    for block in row.chunks_exact(16) {
        let scale = to_e4m3(lanes::largest(block) / LARGEST_E2M1 / all);
        let step = from_e4m3(scale) * all;
        let code = |x: f32| if step > 0.0 { to_e2m1(x / step) } else { 0 };
        out.extend(block.chunks_exact(2).map(|pair| code(pair[0]) << 4 | code(pair[1])));
        scales.push(scale);
    }
}

/// Scales by rows, put into tiles of 128 rows by 4, with zeros around.
fn in_tiles(scales: &[u8], across: usize, rows: usize) -> Vec<u8> {
    let mut tiles = vec![0; rows.next_multiple_of(128) * across.next_multiple_of(4)];
    for (i, scale) in scales.iter().enumerate() {
        tiles[swizzled(i / across.max(1), i % across.max(1), across)] = *scale;
    }
    tiles
}

/// The largest absolute value.
fn largest(rows: &Rows<'_>, threads: usize) -> f32 {
    let pieces = in_pieces(rows.count(), threads, |range| {
        let mut row = vec![0f32; rows.cols()];
        range.fold(0f32, |m, i| {
            rows.read(i, &mut row);
            m.max(lanes::largest(&row))
        })
    });
    pieces.into_iter().fold(0f32, f32::max)
}

fn compare(rows: &Rows<'_>, matrix: &Packed, threads: usize) -> [f64; 2] {
    let pieces = in_pieces(rows.count(), threads, |range| {
        let (mut before, mut after) = (vec![0f32; rows.cols()], vec![0f32; rows.cols()]);
        let mut sums = [0f64; 2];
        for i in range {
            rows.read(i, &mut before);
            matrix.read(i, 0, &mut after);
            let [error, value] = lanes::squares(&before, &after);
            sums = [sums[0] + f64::from(error), sums[1] + f64::from(value)];
        }
        sums
    });
    // In the order of rows: the same for any number of threads.
    pieces.into_iter().fold([0.0; 2], |sum, [error, value]| [sum[0] + error, sum[1] + value])
}

/// Work on all rows, a few at a time, the results in the order of rows.
fn in_pieces<T: Send>(
    rows: usize,
    threads: usize,
    work: impl Fn(std::ops::Range<usize>) -> T + Sync,
) -> Vec<T> {
    let pieces = rows.div_ceil(ROWS_AT_ONCE);
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(pieces)));
    let run = || {
        loop {
            let i = next.fetch_add(1, Relaxed);
            if i >= pieces {
                break;
            }
            let result = work(i * ROWS_AT_ONCE..rows.min((i + 1) * ROWS_AT_ONCE));
            lock(&done).push((i, result));
        }
    };
    std::thread::scope(|scope| {
        (1..threads.min(pieces)).for_each(|_| drop(scope.spawn(run)));
        run();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

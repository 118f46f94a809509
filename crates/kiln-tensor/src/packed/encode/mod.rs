//! Encodes rows of floats: the opposite of [`PackedTensor::read`](super::PackedTensor::read).

mod blocks;
mod k_blocks;
mod k_search;

use half::{bf16, f16};

use super::Format;
use super::small_floats::{from_e4m3, to_e2m1, to_e4m3};
use crate::{Error, Result, vector};

/// The largest e4m3 value.
pub(crate) const MAX_E4M3: f32 = 448.0;
/// The largest e2m1 value.
pub(crate) const MAX_E2M1: f32 = 6.0;

/// The largest value before the scale, in a format with one scale for the whole matrix; `None` for all others.
pub fn max_unscaled(format: Format) -> Option<f32> {
    match format {
        Format::F8E4M3 => Some(MAX_E4M3),
        Format::NvFp4 => Some(MAX_E4M3 * MAX_E2M1),
        _ => None,
    }
}

/// Appends a row, a multiple of the format's block, to `out`, and its block scales in nvfp4 to `block_scales`. `scale` is
/// the matrix's, in formats that have one ([`max_unscaled`]).
pub fn encode_row(
    row: &[f32],
    format: Format,
    scale: Option<f32>,
    out: &mut Vec<u8>,
    block_scales: &mut Vec<u8>,
) -> Result<()> {
    check_range(row, format)?;
    match (format, scale) {
        (Format::F32, _) => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
        (Format::BF16, _) => out.extend(row.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        (Format::F16, _) => out.extend(row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        (Format::Q4_0, _) => encode_blocks(row, blocks::q4_0, out),
        (Format::Q4_1, _) => encode_blocks(row, blocks::q4_1, out),
        (Format::Q5_0, _) => encode_blocks(row, blocks::q5_0, out),
        (Format::Q5_1, _) => encode_blocks(row, blocks::q5_1, out),
        (Format::Q8_0, _) => encode_blocks(row, blocks::q8_0, out),
        (Format::Q2K, _) => encode_blocks(row, k_blocks::q2_k, out),
        (Format::Q3K, _) => encode_blocks(row, k_blocks::q3_k, out),
        (Format::Q4K, _) => encode_blocks(row, k_blocks::q4_k, out),
        (Format::Q5K, _) => encode_blocks(row, k_blocks::q5_k, out),
        (Format::Q6K, _) => encode_blocks(row, k_blocks::q6_k, out),
        (Format::F8E4M3, Some(scale)) => out.extend(row.iter().map(|x| to_e4m3(x / scale))),
        (Format::NvFp4, Some(scale)) => encode_nvfp4(row, scale, out, block_scales),
        (Format::F8E4M3 | Format::NvFp4 | Format::I8, _) => unreachable!("{format} has scales"),
        (Format::Iq4Nl | Format::Iq4Xs | Format::F8E5M2, _) => return Err(Error::ReadOnly { format }),
    }
    Ok(())
}

fn encode_blocks<const N: usize>(row: &[f32], encode: fn(&[f32; N], &mut Vec<u8>), out: &mut Vec<u8>) {
    row.as_chunks::<N>().0.iter().for_each(|block| encode(block, out));
}

/// Refuses finite values that would become infinite. Others that are not finite are found by their squares.
fn check_range(row: &[f32], format: Format) -> Result<()> {
    let limit = match format {
        Format::F32 => return Ok(()),
        Format::BF16 => bf16::MAX.to_f32(),
        // Their scales are f32; half of what it holds leaves room to round up.
        Format::F8E4M3 | Format::F8E5M2 | Format::NvFp4 => f32::MAX / 2.0,
        // The scales and minima of blocks are f16, too.
        _ => f16::MAX.to_f32(),
    };
    let largest = vector::max_abs(row);
    if largest <= limit || largest.is_infinite() {
        return Ok(());
    }
    let [value, limit] = [largest, limit].map(|x| format!("{x:e}"));
    Err(Error::OutOfRange { value, format, limit })
}

/// nvfp4 values, the first of a pair in the high half, and a scale per 16 of them.
fn encode_nvfp4(row: &[f32], global: f32, out: &mut Vec<u8>, block_scales: &mut Vec<u8>) {
    for block in row.chunks_exact(16) {
        let scale = to_e4m3(vector::max_abs(block) / MAX_E2M1 / global);
        let step = from_e4m3(scale) * global;
        let code = |x: f32| if step > 0.0 { to_e2m1(x / step) } else { 0 };
        out.extend(block.chunks_exact(2).map(|pair| code(pair[0]) << 4 | code(pair[1])));
        block_scales.push(scale);
    }
}

//! Rearranging bf16 and bytes into AMX tiles.
//!
//! A left tile is 16 rows of 64 bytes of the sum. A right tile is 16 rows, each of 4 bytes of the sum for 16 columns.
//! Tiles always come in twos, [`PAIR`] rows or columns, a step of [`LINE`] bytes of the sum after the other.

use std::arch::x86_64::*;
use std::ops::Range;

use kiln_tensor::bf16;

use super::panels::BLOCK;
use crate::element::convert;
use crate::simd::{Amx, Simd, TILE, TILE_BYTES};
use crate::weight::{Format, Stack};

/// Bytes of a row of a tile.
pub(crate) const LINE: usize = 64;
/// bf16 values in them.
pub(crate) const STEP: usize = 32;
/// Rows of two left tiles, columns of two right tiles.
pub(crate) const PAIR: usize = 32;
/// Sums of two left and two right tiles.
pub(crate) const SUMS: usize = PAIR * PAIR;

/// Turns [`PAIR`] rows of a right operand that is stored by columns, `stride` bytes apart, into right tiles.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn right_tiles(amx: Amx, lines: &[u8], stride: usize, steps: usize, out: &mut [u8]) {
    assert!(stride.is_multiple_of(4) && lines.len() >= (PAIR - 1) * stride + steps * LINE);
    assert!(out.len() >= steps * 2 * TILE_BYTES);
    for step in 0..steps {
        for half in 0..2 {
            // SAFETY: 16 rows of 64 bytes, inside both as checked above. Four bytes move as one f32; only their place
            // changes.
            unsafe {
                let from = lines.as_ptr().add(half * 16 * stride + step * LINE);
                let to = out.as_mut_ptr().add((step * 2 + half) * TILE_BYTES);
                amx.vectors().transpose(from.cast(), stride / 4, to.cast(), 16);
            }
        }
    }
}

/// Copies bytes `columns` of up to [`PAIR`] rows of a weight into left tiles, zeros where there is nothing.
///
/// Tiles could be loaded from the weight's own rows. But these lie apart by a multiple of a large power of two, where
/// the first-level cache can't hold 32 of them, they begin anywhere in a cache line, and they are read once for every
/// [`PAIR`] of tokens.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn left_tiles(
    amx: Amx,
    weight: &Stack,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [u8],
) {
    if weight.format == Format::Packed {
        return unpacked_tiles(amx, weight, rows, columns, out);
    }
    for i in 0..PAIR {
        let bytes = match rows.start + i < rows.end {
            true => &weight.row(rows.start + i)[columns.clone()],
            false => &[],
        };
        left_line(bytes, i, columns.len().div_ceil(LINE), out);
    }
}

/// [`left_tiles`] of a packed weight, whose values are rounded to bf16.
#[inline(always)]
fn unpacked_tiles(amx: Amx, weight: &Stack, rows: Range<usize>, columns: Range<usize>, out: &mut [u8]) {
    let (mut wide, mut row) = ([0f32; BLOCK / 2], [bf16::ZERO; BLOCK / 2]);
    for i in 0..PAIR {
        let inside = if rows.start + i < rows.end { columns.len() / 2 } else { 0 };
        if inside > 0 {
            weight.unpack(amx.vectors(), rows.start + i, columns.start / 2, &mut wide[..inside]);
            convert(amx.vectors(), &wide[..inside], &mut row[..inside]);
        }
        left_line(bytemuck::cast_slice(&row[..inside]), i, columns.len().div_ceil(LINE), out);
    }
}

/// Writes one row, zeros beyond its end, as row `i` of the left tiles in `out`, two for every step.
#[inline(always)]
pub(crate) fn left_line(bytes: &[u8], i: usize, steps: usize, out: &mut [u8]) {
    // Whole lines apart from the last: one loop for both would call a function for every line.
    let (lines, rest) = bytes.as_chunks::<LINE>();
    let mut tiles = out.chunks_exact_mut(2 * TILE_BYTES).take(steps);
    for (line, tile) in lines.iter().zip(&mut tiles) {
        tile[LINE * i..][..LINE].copy_from_slice(line);
    }
    let mut last = [0; LINE];
    last[..rest.len()].copy_from_slice(rest);
    for tile in tiles {
        tile[LINE * i..][..LINE].copy_from_slice(&last);
        last = [0; LINE];
    }
}

/// Turns two rows of a right operand that is stored as it is multiplied, [`PAIR`] columns of each, into row `pair` of
/// two right tiles.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn interleave_pair(rows: [&[bf16; PAIR]; 2], pair: usize, out: &mut [bf16]) {
    assert!(pair < 16 && out.len() >= 2 * TILE);
    let mut places = [0u16; PAIR];
    for (i, place) in places.iter_mut().enumerate() {
        *place = (i / 2 + i % 2 * PAIR) as u16;
    }
    // SAFETY: whole vectors inside all arrays; row `pair` of both tiles lies inside `out`.
    unsafe {
        let first = _mm512_loadu_si512(places.as_ptr().cast());
        let second = _mm512_add_epi16(first, _mm512_set1_epi16(PAIR as i16 / 2));
        let (a, b) =
            (_mm512_loadu_si512(rows[0].as_ptr().cast()), _mm512_loadu_si512(rows[1].as_ptr().cast()));
        let to = out.as_mut_ptr().add(pair * STEP);
        _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(a, first, b));
        _mm512_storeu_si512(to.add(TILE).cast(), _mm512_permutex2var_epi16(a, second, b));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_storing_give_the_same_right_tiles() {
        let Some(amx) = Amx::detect() else { return };
        // Value k of column j.
        let value = |k: usize, j: usize| bf16::from_f32((k * 7 + j) as f32);
        let by_column: Vec<bf16> = (0..PAIR).flat_map(|j| (0..STEP).map(move |k| value(k, j))).collect();
        let [mut transposed, mut interleaved] = [[bf16::ZERO; 2 * TILE]; 2];
        // SAFETY: the token proves AVX-512.
        unsafe {
            right_tiles(
                amx,
                bytemuck::cast_slice(&by_column),
                LINE,
                1,
                bytemuck::cast_slice_mut(&mut transposed),
            );
            for pair in 0..STEP / 2 {
                let rows = [2 * pair, 2 * pair + 1].map(|k| std::array::from_fn(|j| value(k, j)));
                interleave_pair([&rows[0], &rows[1]], pair, &mut interleaved);
            }
        }
        assert!(transposed == interleaved);
        // Row 3 of the second tile: values 6 and 7 of column 16 first.
        assert_eq!(transposed[TILE + 3 * STEP..][..2], [value(6, 16), value(7, 16)]);
    }
}

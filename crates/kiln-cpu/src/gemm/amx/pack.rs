//! Packing of bf16 and int8 into AMX tiles.
//!
//! A left tile has 16 rows of 64 bytes. A right tile has 16 rows, each with 4 bytes of 16 columns. Packed tiles come
//! two at a time, for a [`PAIR`] of rows or columns, one step of [`TILE_ROW_BYTES`] after the other.

use std::arch::x86_64::*;

use kiln_tensor::bf16;

use super::sizes::{PAIR, TILE_ROW_BF16, TILE_ROW_BYTES};
use crate::isa::Amx;
use crate::simd::{Simd, TILE_BF16, TILE_BYTES};

/// Packs [`PAIR`] columns of a right operand, each stored as a row, `stride` bytes apart, into right tiles.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn pack_right_tiles(amx: Amx, lines: &[u8], stride: usize, steps: usize, out: &mut [u8]) {
    assert!(stride.is_multiple_of(4) && lines.len() >= (PAIR - 1) * stride + steps * TILE_ROW_BYTES);
    assert!(out.len() >= steps * 2 * TILE_BYTES);
    for step in 0..steps {
        for half in 0..2 {
            // SAFETY: 16 rows of 64 bytes, inside both as checked above. Four bytes move as one f32, which keeps their bits.
            unsafe {
                let from = lines.as_ptr().add(half * 16 * stride + step * TILE_ROW_BYTES);
                let to = out.as_mut_ptr().add((step * 2 + half) * TILE_BYTES);
                amx.avx512().transpose(from.cast(), stride / 4, to.cast(), 16);
            }
        }
    }
}

/// Writes one row, with zeros past its end, as row `i` of the left tiles in `out`, two per step.
#[inline(always)]
pub(crate) fn pack_left_row(bytes: &[u8], i: usize, steps: usize, out: &mut [u8]) {
    // Whole lines first, then the rest: one loop for both would call memcpy for every line.
    let (lines, rest) = bytes.as_chunks::<TILE_ROW_BYTES>();
    let mut tiles = out.chunks_exact_mut(2 * TILE_BYTES).take(steps);
    for (line, tile) in lines.iter().zip(&mut tiles) {
        tile[TILE_ROW_BYTES * i..][..TILE_ROW_BYTES].copy_from_slice(line);
    }
    let mut last = [0; TILE_ROW_BYTES];
    last[..rest.len()].copy_from_slice(rest);
    for tile in tiles {
        tile[TILE_ROW_BYTES * i..][..TILE_ROW_BYTES].copy_from_slice(&last);
        last = [0; TILE_ROW_BYTES];
    }
}

/// Packs two rows of a right operand that is stored as `[depth, columns]`, [`PAIR`] columns of each, as row `pair` of two
/// right tiles.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn pack_right_row_pair(rows: [&[bf16; PAIR]; 2], pair: usize, out: &mut [bf16]) {
    assert!(pair < 16 && out.len() >= 2 * TILE_BF16);
    let mut indices = [0u16; PAIR];
    for (i, index) in indices.iter_mut().enumerate() {
        *index = (i / 2 + i % 2 * PAIR) as u16;
    }
    // SAFETY: whole vectors inside all arrays; row `pair` of both tiles lies inside `out`.
    unsafe {
        let first = _mm512_loadu_si512(indices.as_ptr().cast());
        let second = _mm512_add_epi16(first, _mm512_set1_epi16(PAIR as i16 / 2));
        let (a, b) =
            (_mm512_loadu_si512(rows[0].as_ptr().cast()), _mm512_loadu_si512(rows[1].as_ptr().cast()));
        let to = out.as_mut_ptr().add(pair * TILE_ROW_BF16);
        _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(a, first, b));
        _mm512_storeu_si512(to.add(TILE_BF16).cast(), _mm512_permutex2var_epi16(a, second, b));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_storage_orders_give_the_same_right_tiles() {
        let Some(amx) = Amx::detect() else { return };
        // Value k of column j.
        let value = |k: usize, j: usize| bf16::from_f32((k * 7 + j) as f32);
        let by_column: Vec<bf16> =
            (0..PAIR).flat_map(|j| (0..TILE_ROW_BF16).map(move |k| value(k, j))).collect();
        let [mut transposed, mut interleaved] = [[bf16::ZERO; 2 * TILE_BF16]; 2];
        // SAFETY: the token proves AVX-512.
        unsafe {
            pack_right_tiles(
                amx,
                bytemuck::cast_slice(&by_column),
                TILE_ROW_BYTES,
                1,
                bytemuck::cast_slice_mut(&mut transposed),
            );
            for pair in 0..TILE_ROW_BF16 / 2 {
                let rows = [2 * pair, 2 * pair + 1].map(|k| std::array::from_fn(|j| value(k, j)));
                pack_right_row_pair([&rows[0], &rows[1]], pair, &mut interleaved);
            }
        }
        assert!(transposed == interleaved);
        // Row 3 of the second tile: values 6 and 7 of column 16 first.
        assert_eq!(transposed[TILE_BF16 + 3 * TILE_ROW_BF16..][..2], [value(6, 16), value(7, 16)]);
    }
}

//! Rearranging bf16 into AMX tiles.
//!
//! A left tile is 16 rows of 32 values of the sum. A right tile is 16 rows, each of a pair of values of the sum for 16
//! columns. Tiles always come in twos, [`PAIR`] rows or columns, a step of [`STEP`] values of the sum after the other.

use std::arch::x86_64::*;

use kiln_tensor::bf16;

use crate::simd::{Amx, Simd, TILE};

/// Values of the sum in one tile.
pub(crate) const STEP: usize = 32;
/// Rows of two left tiles, columns of two right tiles.
pub(crate) const PAIR: usize = 32;
/// Sums of two left and two right tiles.
pub(crate) const SUMS: usize = PAIR * PAIR;

/// Writes one row, zeros beyond its end, as row `i` of the left tiles in `out`, two for every step.
#[inline(always)]
pub(crate) fn left_row(row: &[bf16], i: usize, steps: usize, out: &mut [bf16]) {
    let whole = row.len() / STEP;
    for (step, tile) in out.chunks_exact_mut(2 * TILE).take(steps).enumerate() {
        let to = &mut tile[STEP * i..][..STEP];
        if step < whole {
            to.copy_from_slice(&row[STEP * step..][..STEP]);
        } else {
            let rest = &row[(STEP * step).min(row.len())..];
            to[..rest.len()].copy_from_slice(rest);
            to[rest.len()..].fill(bf16::ZERO);
        }
    }
}

/// Turns [`PAIR`] rows of a right operand that is stored by columns, `stride` apart, into right tiles.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn transpose_pairs(
    amx: Amx,
    lines: &[bf16],
    stride: usize,
    steps: usize,
    out: &mut [bf16],
) {
    assert!(steps * STEP <= stride && stride.is_multiple_of(2));
    assert!(lines.len() >= PAIR * stride && out.len() >= steps * 2 * TILE);
    // A pair of bf16 moves as one f32; only its place changes.
    let (from, to) = (lines.as_ptr().cast::<f32>(), out.as_mut_ptr().cast::<f32>());
    for step in 0..steps {
        for half in 0..2 {
            // SAFETY: 16 rows of 16 pairs, inside both as checked above.
            unsafe {
                let from = from.add((half * PAIR / 2 * stride + step * STEP) / 2);
                amx.vectors().transpose(from, stride / 2, to.add((step * 2 + half) * TILE / 2), 16);
            }
        }
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
            transpose_pairs(amx, &by_column, STEP, 1, &mut transposed);
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

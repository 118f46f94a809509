//! Transposing the sums of a bf16 product, whose tiles have a row per weight row, into rows of tokens.

use std::arch::x86_64::*;

use super::sizes::{PAIR, QUAD_SUMS};
use crate::simd::TILE_BYTES;

/// Writes a quad of sums transposed: one row per token, `stride` apart.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn transpose_quad(quad: &[f32], stride: usize, out: &mut [f32]) {
    assert!(quad.len() >= QUAD_SUMS && stride >= PAIR && out.len() >= (PAIR - 1) * stride + PAIR);
    for (tile, sums) in quad[..QUAD_SUMS].chunks_exact(TILE_BYTES / 4).enumerate() {
        let (col, token) = (tile / 2 * 16, tile % 2 * 16);
        for first in (0..16).step_by(4) {
            // SAFETY: four values of each of the tile's 16 rows; the 16 values of a token lie inside `out`, as checked
            // above.
            unsafe {
                for (i, line) in four_tokens(sums.as_ptr().add(first)).into_iter().enumerate() {
                    _mm512_storeu_ps(out.as_mut_ptr().add((token + first + i) * stride + col), line);
                }
            }
        }
    }
}

/// The sums of four tokens in a tile of 16 rows. Loading every fourth row side by side does half of the usual transpose.
///
/// # Safety
/// The machine has AVX-512; four values can be read in each of 16 rows of 16 values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn four_tokens(tile: *const f32) -> [__m512; 4] {
    let mut rows = [_mm512_setzero_ps(); 4];
    for (k, rows) in rows.iter_mut().enumerate() {
        // SAFETY: upheld by the caller.
        unsafe {
            let v = _mm512_castps128_ps512(_mm_loadu_ps(tile.add(k * 16)));
            let v = _mm512_insertf32x4::<1>(v, _mm_loadu_ps(tile.add((4 + k) * 16)));
            let v = _mm512_insertf32x4::<2>(v, _mm_loadu_ps(tile.add((8 + k) * 16)));
            *rows = _mm512_insertf32x4::<3>(v, _mm_loadu_ps(tile.add((12 + k) * 16)));
        }
    }
    let [a, b, c, d] = rows;
    let low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
    let high = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
    let [first, second] = [_mm512_unpacklo_pd(low, high), _mm512_unpackhi_pd(low, high)];
    let low = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    let high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    let [third, fourth] = [_mm512_unpacklo_pd(low, high), _mm512_unpackhi_pd(low, high)];
    [_mm512_castpd_ps(first), _mm512_castpd_ps(second), _mm512_castpd_ps(third), _mm512_castpd_ps(fourth)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Amx;

    #[test]
    fn a_quad_is_transposed() {
        if Amx::detect().is_none() {
            return;
        }
        // Index of the sum of a column and a token in the tiles.
        let index = |col: usize, token: usize| (col / 16 * 2 + token / 16) * 256 + col % 16 * 16 + token % 16;
        let mut quad = vec![0f32; QUAD_SUMS];
        for i in 0..QUAD_SUMS {
            quad[index(i / PAIR, i % PAIR)] = i as f32;
        }
        let mut transposed = vec![0f32; QUAD_SUMS];
        // SAFETY: a machine with AMX has AVX-512.
        unsafe { transpose_quad(&quad, PAIR, &mut transposed) };
        for (i, &sum) in transposed.iter().enumerate() {
            let (token, col) = (i / PAIR, i % PAIR);
            assert_eq!(sum, (col * PAIR + token) as f32);
        }
    }
}

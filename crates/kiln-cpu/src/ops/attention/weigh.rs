//! The running softmax on squares of sums as AMX leaves them: 32 queries by 32 keys in four tiles.

use std::arch::x86_64::*;
use std::ops::Range;

use kiln_tensor::bf16;

use super::softmax::Running;
use crate::element::write;
use crate::gemm::{PAIR, STEP, SUMS};
use crate::math::rough_exp2;
use crate::simd::{Amx, Simd, TILE};

/// One query of a step.
pub(super) struct Row<'a> {
    /// Its number in the step.
    pub i: usize,
    /// The keys of the block that it sees.
    pub seen: Range<usize>,
    /// Keys of the block, whole tiles of them.
    pub width: usize,
    /// Makes a score the logarithm, to base 2, of a weight.
    pub scale: f32,
    pub running: &'a mut Running,
}

/// Some queries of a step that see all keys of the block.
pub(super) struct Rows<'a> {
    /// The first one's number in the step.
    pub i: usize,
    /// As in [`Row`].
    pub width: usize,
    pub scale: f32,
    pub running: &'a mut [Running; ROWS],
}

/// Where row `i` begins in a square of sums; its second half lies a tile further.
#[inline(always)]
fn line(i: usize) -> usize {
    i / 16 * 512 + i % 16 * 16
}

/// Turns the scores of a query into weights, and rescales its sums when a larger score turned up.
///
/// # Safety
/// The machine has AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn weigh(amx: Amx, row: Row<'_>, scores: &[f32], weights: &mut [bf16], sums: &mut [f32]) {
    let s = amx.vectors();
    let Row { i, seen, width, scale, running } = row;
    assert!(i < PAIR && seen.end <= width && scores.len() >= PAIR * width && weights.len() >= PAIR * width);
    let square = |step: usize| step * SUMS + line(i);
    // SAFETY: every vector lies in row `i` of one of the `width / PAIR` squares, whose sizes were checked.
    unsafe {
        let all = seen == (0..width);
        let load = |step: usize, half: usize| s.load(scores.as_ptr().add(square(step) + half * 256));
        let mask = |step: usize, half: usize| inside(&seen, step * PAIR + half * 16);
        let steps = if seen.is_empty() { 0..0 } else { seen.start / PAIR..seen.end.div_ceil(PAIR) };
        let mut best = _mm512_set1_ps(running.largest);
        for step in steps.clone() {
            for half in 0..2 {
                let x = load(step, half);
                best = match all {
                    true => _mm512_max_ps(best, x),
                    false => _mm512_mask_max_ps(best, mask(step, half), best, x),
                };
            }
        }
        let best = _mm512_reduce_max_ps(best);
        let (by, shift) = (_mm512_set1_ps(scale), _mm512_set1_ps(-best * scale));
        let mut total = _mm512_setzero_ps();
        let to = weights.as_mut_ptr();
        for step in 0..width / PAIR {
            let mut pair = [_mm512_setzero_ps(); 2];
            if steps.contains(&step) {
                for (half, weight) in pair.iter_mut().enumerate() {
                    *weight = rough_exp2(s, _mm512_fmadd_ps(load(step, half), by, shift));
                    if !all {
                        *weight = _mm512_maskz_mov_ps(mask(step, half), *weight);
                    }
                    total = _mm512_add_ps(total, *weight);
                }
            }
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(pair[1], pair[0]));
            _mm512_storeu_si512(to.add(step * 2 * TILE + i * STEP).cast(), rounded);
        }
        if steps.is_empty() {
            return;
        }
        rescale(running, best, scale, i, sums);
        running.total += _mm512_reduce_add_ps(total);
    }
}

/// Rows that [`weigh_all`] takes at once: their sums and what is subtracted from their scores stay in registers, and
/// they lie side by side in a tile.
pub(super) const ROWS: usize = 8;

/// [`weigh`] for the [`ROWS`] queries from the `i`th on, all of which see all `width` keys.
///
/// # Safety
/// The machine has AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn weigh_all(
    amx: Amx,
    rows: Rows<'_>,
    scores: &[f32],
    weights: &mut [bf16],
    sums: &mut [f32],
) {
    let s = amx.vectors();
    let Rows { i, width, scale, running } = rows;
    assert!(i.is_multiple_of(ROWS) && i < PAIR);
    assert!(scores.len() >= PAIR * width && weights.len() >= PAIR * width);
    let steps = width / PAIR;
    // SAFETY: every vector lies in rows `i..i + ROWS` of one of the `steps` squares, whose sizes were checked.
    unsafe {
        let (from, to) = (scores.as_ptr().add(line(i)), weights.as_mut_ptr().add(i * STEP));
        let mut best = [_mm512_setzero_ps(); ROWS];
        for (best, running) in best.iter_mut().zip(&*running) {
            *best = _mm512_set1_ps(running.largest);
        }
        for half in 0..2 * steps {
            for (r, best) in best.iter_mut().enumerate() {
                let x = s.load(from.add(half / 2 * SUMS + half % 2 * 256 + r * 16));
                *best = _mm512_max_ps(*best, x);
            }
        }
        let mut most = [0.0; ROWS];
        let (mut shift, mut total) = ([_mm512_setzero_ps(); ROWS], [_mm512_setzero_ps(); ROWS]);
        for r in 0..ROWS {
            most[r] = _mm512_reduce_max_ps(best[r]);
            shift[r] = _mm512_set1_ps(-most[r] * scale);
        }
        let by = _mm512_set1_ps(scale);
        for step in 0..steps {
            for r in 0..ROWS {
                let at = from.add(step * SUMS + r * 16);
                let weight =
                    |half: usize| rough_exp2(s, _mm512_fmadd_ps(s.load(at.add(half * 256)), by, shift[r]));
                let (low, high) = (weight(0), weight(1));
                total[r] = _mm512_add_ps(_mm512_add_ps(total[r], low), high);
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.add(step * 2 * TILE + r * STEP).cast(), rounded);
            }
        }
        for (r, running) in running.iter_mut().enumerate() {
            rescale(running, most[r], scale, i + r, sums);
            running.total += _mm512_reduce_add_ps(total[r]);
        }
    }
}

/// Multiplies what query `i` has summed by what a new largest score asks for.
///
/// # Safety
/// The machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn rescale(running: &mut Running, best: f32, scale: f32, i: usize, sums: &mut [f32]) {
    if best > running.largest {
        // 2^-inf is 0: the first block starts from nothing.
        let factor = ((running.largest - best) * scale).exp2();
        running.total *= factor;
        running.largest = best;
        let factor = _mm512_set1_ps(factor);
        for sums in sums.chunks_exact_mut(SUMS) {
            for half in 0..2 {
                // SAFETY: row `i` of a square.
                unsafe {
                    let sum = sums.as_mut_ptr().add(line(i) + half * 256);
                    _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factor));
                }
            }
        }
    }
}

/// Which of the 16 keys from `first` on lie in `seen`.
#[inline(always)]
fn inside(seen: &Range<usize>, first: usize) -> u16 {
    let below = |end: usize| ((1u32 << end.saturating_sub(first).min(16)) - 1) as u16;
    below(seen.end) & !below(seen.start)
}

/// Writes row `i` of the sums over `by`.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn divide(amx: Amx, sums: &[f32], i: usize, by: f32, out: &mut [bf16]) {
    let s = amx.vectors();
    let by = s.splat(1.0 / by);
    for at in (0..out.len()).step_by(16) {
        let from = at / PAIR * SUMS + at % PAIR / 16 * 256 + line(i);
        let sums = &sums[from..from + 16];
        // SAFETY: 16 values were just checked to be there.
        write(s, out, at, s.mul(unsafe { s.load(sums.as_ptr()) }, by));
    }
}

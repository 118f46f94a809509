//! The online softmax on quads of scores as AMX stores them: 32 queries by 32 keys in four tiles.

use std::arch::x86_64::*;
use std::ops::Range;

use kiln_tensor::bf16;

use super::softmax::SoftmaxState;
use crate::element::write;
use crate::gemm::{PAIR, QUAD_SUMS, TILE_ROW_BF16};
use crate::isa::Amx;
use crate::math::exp2_approx;
use crate::simd::{Simd, TILE_BF16};

/// One query of a step.
pub(super) struct MaskedRow<'a> {
    /// Its index in the step.
    pub i: usize,
    /// The keys of the block that it attends to.
    pub visible: Range<usize>,
    /// Keys of the block, in whole pairs.
    pub width: usize,
    /// The factor that turns a score into the base-2 logarithm of a weight.
    pub scale: f32,
    pub state: &'a mut SoftmaxState,
}

/// [`ROW_GROUP`] queries of a step that attend to all keys of the block.
pub(super) struct UnmaskedRows<'a> {
    /// The index of the first one in the step.
    pub first: usize,
    /// As in [`MaskedRow`].
    pub width: usize,
    pub scale: f32,
    pub states: &'a mut [SoftmaxState; ROW_GROUP],
}

/// The offset of row `i` in a quad; its second half lies a tile further.
#[inline(always)]
fn row_offset(i: usize) -> usize {
    i / 16 * 512 + i % 16 * 16
}

/// Turns the scores of a query into weights, and rescales its sums if there is a new largest score.
///
/// # Safety
/// The machine has AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn softmax_masked_row(
    amx: Amx,
    row: MaskedRow<'_>,
    scores: &[f32],
    weights: &mut [bf16],
    sums: &mut [f32],
) {
    let s = amx.avx512();
    let MaskedRow { i, visible, width, scale, state } = row;
    assert!(
        i < PAIR && visible.end <= width && scores.len() >= PAIR * width && weights.len() >= PAIR * width
    );
    let offset = |step: usize| step * QUAD_SUMS + row_offset(i);
    // SAFETY: every vector lies in row `i` of one of the `width / PAIR` quads, whose sizes were checked.
    unsafe {
        let all = visible == (0..width);
        let load = |step: usize, half: usize| s.load(scores.as_ptr().add(offset(step) + half * 256));
        let mask = |step: usize, half: usize| visible_lanes(&visible, step * PAIR + half * 16);
        let steps = if visible.is_empty() { 0..0 } else { visible.start / PAIR..visible.end.div_ceil(PAIR) };
        let mut max = _mm512_set1_ps(state.max);
        for step in steps.clone() {
            for half in 0..2 {
                let x = load(step, half);
                max = if all {
                    _mm512_max_ps(max, x)
                } else {
                    _mm512_mask_max_ps(max, mask(step, half), max, x)
                };
            }
        }
        let max = _mm512_reduce_max_ps(max);
        let (factor, shift) = (_mm512_set1_ps(scale), _mm512_set1_ps(-max * scale));
        let mut total = _mm512_setzero_ps();
        let to = weights.as_mut_ptr();
        for step in 0..width / PAIR {
            let mut pair = [_mm512_setzero_ps(); 2];
            if steps.contains(&step) {
                for (half, weight) in pair.iter_mut().enumerate() {
                    *weight = exp2_approx(s, _mm512_fmadd_ps(load(step, half), factor, shift));
                    if !all {
                        *weight = _mm512_maskz_mov_ps(mask(step, half), *weight);
                    }
                    total = _mm512_add_ps(total, *weight);
                }
            }
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(pair[1], pair[0]));
            _mm512_storeu_si512(to.add(step * 2 * TILE_BF16 + i * TILE_ROW_BF16).cast(), rounded);
        }
        if steps.is_empty() {
            return;
        }
        rescale(state, max, scale, i, sums);
        state.total += _mm512_reduce_add_ps(total);
    }
}

/// Rows of one [`softmax_unmasked_rows`]: their totals and shifts stay in registers, and they are neighbours in a tile.
pub(super) const ROW_GROUP: usize = 8;

/// [`softmax_masked_row`] for [`ROW_GROUP`] queries that attend to all keys of the block.
///
/// # Safety
/// The machine has AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn softmax_unmasked_rows(
    amx: Amx,
    rows: UnmaskedRows<'_>,
    scores: &[f32],
    weights: &mut [bf16],
    sums: &mut [f32],
) {
    let s = amx.avx512();
    let UnmaskedRows { first, width, scale, states } = rows;
    assert!(first.is_multiple_of(ROW_GROUP) && first < PAIR);
    assert!(scores.len() >= PAIR * width && weights.len() >= PAIR * width);
    let steps = width / PAIR;
    // SAFETY: every vector lies in rows `first..first + ROW_GROUP` of one of the `steps` quads, whose sizes were checked.
    unsafe {
        let (from, to) =
            (scores.as_ptr().add(row_offset(first)), weights.as_mut_ptr().add(first * TILE_ROW_BF16));
        let mut max_lanes = [_mm512_setzero_ps(); ROW_GROUP];
        for (max, state) in max_lanes.iter_mut().zip(&*states) {
            *max = _mm512_set1_ps(state.max);
        }
        for half in 0..2 * steps {
            for (r, max) in max_lanes.iter_mut().enumerate() {
                let x = s.load(from.add(half / 2 * QUAD_SUMS + half % 2 * 256 + r * 16));
                *max = _mm512_max_ps(*max, x);
            }
        }
        let mut max = [0.0; ROW_GROUP];
        let (mut shift, mut total) = ([_mm512_setzero_ps(); ROW_GROUP], [_mm512_setzero_ps(); ROW_GROUP]);
        for r in 0..ROW_GROUP {
            max[r] = _mm512_reduce_max_ps(max_lanes[r]);
            shift[r] = _mm512_set1_ps(-max[r] * scale);
        }
        let factor = _mm512_set1_ps(scale);
        for step in 0..steps {
            for r in 0..ROW_GROUP {
                let at = from.add(step * QUAD_SUMS + r * 16);
                let weight = |half: usize| {
                    exp2_approx(s, _mm512_fmadd_ps(s.load(at.add(half * 256)), factor, shift[r]))
                };
                let (low, high) = (weight(0), weight(1));
                total[r] = _mm512_add_ps(_mm512_add_ps(total[r], low), high);
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.add(step * 2 * TILE_BF16 + r * TILE_ROW_BF16).cast(), rounded);
            }
        }
        for (r, state) in states.iter_mut().enumerate() {
            rescale(state, max[r], scale, first + r, sums);
            state.total += _mm512_reduce_add_ps(total[r]);
        }
    }
}

/// Rescales the sums of query `i` if `max` is a new largest score.
///
/// # Safety
/// The machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn rescale(state: &mut SoftmaxState, max: f32, scale: f32, i: usize, sums: &mut [f32]) {
    if max > state.max {
        // 2^-inf is 0: the first block starts from zero.
        let factor = ((state.max - max) * scale).exp2();
        state.total *= factor;
        state.max = max;
        let factor = _mm512_set1_ps(factor);
        for sums in sums.chunks_exact_mut(QUAD_SUMS) {
            for half in 0..2 {
                // SAFETY: row `i` of a quad.
                unsafe {
                    let sum = sums.as_mut_ptr().add(row_offset(i) + half * 256);
                    _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factor));
                }
            }
        }
    }
}

/// The mask of those of the 16 keys from `first` on that are visible.
#[inline(always)]
fn visible_lanes(visible: &Range<usize>, first: usize) -> u16 {
    let below = |end: usize| ((1u32 << end.saturating_sub(first).min(16)) - 1) as u16;
    below(visible.end) & !below(visible.start)
}

/// Writes row `i` of the sums, divided by `total`.
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn divide(amx: Amx, sums: &[f32], i: usize, total: f32, out: &mut [bf16]) {
    let s = amx.avx512();
    let factor = s.splat(1.0 / total);
    for at in (0..out.len()).step_by(16) {
        let from = at / PAIR * QUAD_SUMS + at % PAIR / 16 * 256 + row_offset(i);
        let sums = &sums[from..from + 16];
        // SAFETY: the slice has 16 values.
        write(s, out, at, s.mul(unsafe { s.load(sums.as_ptr()) }, factor));
    }
}

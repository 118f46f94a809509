//! Online softmax: scores come block by block, and the sums so far are rescaled whenever a larger score turns up.

use std::ops::Range;

use crate::element::{load, read, store, write};
use crate::math::exp;
use crate::simd::{MAX_LANES, Simd, Sum, dispatch, reduce_max};

/// The state of a query's softmax between blocks of keys.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxState {
    /// The largest score so far.
    pub max: f32,
    /// The sum of `exp(score - max)` so far.
    pub total: f32,
}

impl SoftmaxState {
    pub const START: SoftmaxState = SoftmaxState { max: f32::NEG_INFINITY, total: 0.0 };
}

#[inline(always)]
fn step_kernel<S: Simd>(
    s: S,
    scores: &mut [f32],
    visible: Range<usize>,
    state: &mut SoftmaxState,
    sums: &mut [f32],
) {
    scores[..visible.start].fill(0.0);
    scores[visible.end..].fill(0.0);
    let scores = &mut scores[visible];
    if scores.is_empty() {
        return;
    }
    let whole = scores.len() / MAX_LANES * MAX_LANES;
    let (blocks, rest) = scores.split_at_mut(whole);
    let mut max = s.splat(state.max);
    for scores in blocks.chunks_exact(S::LANES) {
        max = s.max(max, load(s, scores));
    }
    let mut max = reduce_max(s, max);
    for &score in rest.iter() {
        max = if score > max || score.is_nan() { score } else { max };
    }
    let shift = s.splat(max);
    let mut total = Sum::zero(s);
    for block in blocks.chunks_exact_mut(MAX_LANES) {
        for part in 0..Sum::<S>::PARTS {
            let scores = &mut block[part * S::LANES..][..S::LANES];
            let weight = exp(s, s.sub(load(s, scores), shift));
            total.add(s, part, weight);
            store(s, scores, weight);
        }
    }
    for part in 0..Sum::<S>::PARTS {
        let at = part * S::LANES;
        if at < rest.len() {
            let weight = exp(s, s.sub(read(s, rest, at), shift));
            write(s, rest, at, weight);
            // Read again, because lanes past the end have weights, too.
            total.add(s, part, read(s, rest, at));
        }
    }
    if max > state.max {
        // exp(-inf) is 0: the first block starts from zero. Not the C library's function, which differs by platform.
        let factor = exp(s, s.splat(state.max - max));
        state.total *= reduce_max(s, factor);
        for i in (0..sums.len()).step_by(S::LANES) {
            let v = s.mul(read(s, sums, i), factor);
            write(s, sums, i, v);
        }
        state.max = max;
    }
    state.total += total.total(s);
}

dispatch! {
    /// Processes one block of keys of one query: turns the `visible` scores into weights `exp(score - max)` and the others
    /// into 0, and rescales `sums`, the values weighted so far, if there is a new largest score.
    pub(crate) fn softmax_step(
        scores: &mut [f32], visible: Range<usize>, state: &mut SoftmaxState, sums: &mut [f32],
    ) => step_kernel;
}

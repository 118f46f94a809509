//! Online softmax: scores come block by block, and the sums so far are rescaled whenever a larger score turns up.

use std::ops::Range;

use crate::element::{load, read, store, write};
use crate::math::exp;
use crate::simd::{Simd, dispatch, reduce_add, reduce_max};

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
    let whole = scores.len() / S::LANES * S::LANES;
    let (vectors, rest) = scores.split_at_mut(whole);
    let mut max = s.splat(state.max);
    for scores in vectors.chunks_exact(S::LANES) {
        max = s.max(max, load(s, scores));
    }
    let mut max = reduce_max(s, max);
    for &score in rest.iter() {
        max = if score > max || score.is_nan() { score } else { max };
    }
    let shift = s.splat(max);
    let mut total = s.splat(0.0);
    for scores in vectors.chunks_exact_mut(S::LANES) {
        let weight = exp(s, s.sub(load(s, scores), shift));
        total = s.add(total, weight);
        store(s, scores, weight);
    }
    let mut total = reduce_add(s, total);
    if !rest.is_empty() {
        let weights = exp(s, s.sub(read(s, rest, 0), shift));
        write(s, rest, 0, weights);
        total += rest.iter().sum::<f32>();
    }
    if max > state.max {
        // exp(-inf) is 0: the first block starts from zero.
        let factor = (state.max - max).exp();
        state.total *= factor;
        let factor = s.splat(factor);
        for i in (0..sums.len()).step_by(S::LANES) {
            let v = s.mul(read(s, sums, i), factor);
            write(s, sums, i, v);
        }
        state.max = max;
    }
    state.total += total;
}

dispatch! {
    /// Processes one block of keys of one query: turns the `visible` scores into weights `exp(score - max)` and the others
    /// into 0, and rescales `sums`, the values weighted so far, if there is a new largest score.
    pub(crate) fn softmax_step(
        scores: &mut [f32], visible: Range<usize>, state: &mut SoftmaxState, sums: &mut [f32],
    ) => step_kernel;
}

//! The running softmax of attention: scores come block by block, and what was summed before is rescaled whenever a
//! larger score turns up.

use std::ops::Range;

use crate::element::{load, read, store, write};
use crate::math::exp;
use crate::simd::{Simd, dispatch, largest, sum};

/// What is kept of a query between blocks of keys.
#[derive(Clone, Copy)]
pub(crate) struct Running {
    /// The largest score so far.
    pub largest: f32,
    /// The sum of `exp(score - largest)` so far.
    pub total: f32,
}

impl Running {
    pub const START: Running = Running { largest: f32::NEG_INFINITY, total: 0.0 };
}

/// Turns the scores inside `seen` into weights `exp(score - largest)` and the others into 0; multiplies `sums`, the
/// values weighted so far, by what the new largest score asks for.
#[inline(always)]
fn step_kernel<S: Simd>(s: S, scores: &mut [f32], seen: Range<usize>, run: &mut Running, sums: &mut [f32]) {
    scores[..seen.start].fill(0.0);
    scores[seen.end..].fill(0.0);
    let scores = &mut scores[seen];
    if scores.is_empty() {
        return;
    }
    let whole = scores.len() / S::LANES * S::LANES;
    let (vectors, rest) = scores.split_at_mut(whole);
    let mut best = s.splat(run.largest);
    for scores in vectors.chunks_exact(S::LANES) {
        best = s.max(best, load(s, scores));
    }
    let mut best = largest(s, best);
    for &score in rest.iter() {
        best = if score > best || score.is_nan() { score } else { best };
    }
    let shift = s.splat(best);
    let mut total = s.splat(0.0);
    for scores in vectors.chunks_exact_mut(S::LANES) {
        let weight = exp(s, s.sub(load(s, scores), shift));
        total = s.add(total, weight);
        store(s, scores, weight);
    }
    let mut total = sum(s, total);
    if !rest.is_empty() {
        let weights = exp(s, s.sub(read(s, rest, 0), shift));
        write(s, rest, 0, weights);
        total += rest.iter().sum::<f32>();
    }
    if best > run.largest {
        // exp(-inf) is 0: the first block starts from nothing.
        let factor = (run.largest - best).exp();
        run.total *= factor;
        let factor = s.splat(factor);
        for i in (0..sums.len()).step_by(S::LANES) {
            let v = s.mul(read(s, sums, i), factor);
            write(s, sums, i, v);
        }
        run.largest = best;
    }
    run.total += total;
}

dispatch! {
    /// Takes one query one block of keys further.
    pub(crate) fn step(scores: &mut [f32], seen: Range<usize>, run: &mut Running, sums: &mut [f32]) => step_kernel;
}

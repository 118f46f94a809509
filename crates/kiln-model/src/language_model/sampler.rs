//! Choosing the next token from logits.
//!
//! With a temperature, logits are divided by it, all but the 50 largest are dropped, and a token is drawn with the
//! probabilities that the softmax gives the others, as transformers does by default. Its random numbers can't be had outside
//! torch (they depend on how it draws from many probabilities at once), so a seed gives another text than in diffusers.

use std::cmp::Ordering;

use kiln_tensor::rng::TorchCpu;

/// Number of candidates, transformers' default.
const TOP_K: usize = 50;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The most likely one.
    Greedy,
    /// One of the most likely ones, at random.
    Random {
        /// Above 0; the higher, the more often an unlikely token is chosen.
        temperature: f32,
        /// Equal seeds give equal choices.
        seed: u64,
    },
}

/// Chooses one token after the other.
pub struct Sampler {
    random: Option<(f32, TorchCpu)>,
}

impl Sampler {
    /// Starts a sequence of choices.
    pub fn new(sampling: Sampling) -> Sampler {
        let random = match sampling {
            Sampling::Greedy => None,
            Sampling::Random { temperature, seed } => Some((temperature, TorchCpu::new(seed))),
        };
        Sampler { random }
    }

    /// Chooses a token; 0 if there are no logits.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        match &mut self.random {
            None => greedy(logits),
            Some((temperature, rng)) => draw(&probabilities(logits, *temperature), rng.uniform_f64()),
        }
    }
}

/// The first of the largest logits.
fn greedy(logits: &[f32]) -> u32 {
    let largest = (0u32..).zip(logits).reduce(|best, next| if next.1 > best.1 { next } else { best });
    largest.map_or(0, |(id, _)| id)
}

/// The candidates and their probabilities, most likely first. Candidates that are as likely as the last one stay, too.
pub fn probabilities(logits: &[f32], temperature: f32) -> Vec<(u32, f64)> {
    let mut candidates = Vec::new();
    let (mut threshold, mut limit) = (f32::NEG_INFINITY, 4 * TOP_K);
    // Logits below this are none; a comparison is quicker than a division, whose rounding the margin allows for.
    let mut bound = f32::NEG_INFINITY;
    for (id, &logit) in (0..).zip(logits) {
        if logit < bound || logit / temperature < threshold {
            continue;
        }
        candidates.push((id, logit / temperature));
        if candidates.len() >= limit {
            threshold = keep_largest(&mut candidates);
            bound = threshold * temperature;
            bound -= 1e-6 * bound.abs();
            limit = limit.max(2 * candidates.len());
        }
    }
    keep_largest(&mut candidates);
    candidates.sort_unstable_by(descending);
    let largest = candidates.first().map_or(0.0, |(_, logit)| f64::from(*logit));
    let weight = |logit: f32| (f64::from(logit) - largest).exp();
    let total: f64 = candidates.iter().map(|(_, logit)| weight(*logit)).sum();
    candidates.into_iter().map(|(id, logit)| (id, weight(logit) / total)).collect()
}

/// Keeps the largest logits, and those equal to the last of them, which is returned.
fn keep_largest(candidates: &mut Vec<(u32, f32)>) -> f32 {
    if candidates.len() <= TOP_K {
        return f32::NEG_INFINITY;
    }
    let threshold = candidates.select_nth_unstable_by(TOP_K - 1, descending).1.1;
    candidates.retain(|(_, logit)| *logit >= threshold);
    threshold
}

fn descending(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The candidate at `uniform`, in `[0, 1)`, of the accumulated probabilities.
fn draw(candidates: &[(u32, f64)], uniform: f64) -> u32 {
    let mut rest = uniform;
    for (id, probability) in candidates {
        rest -= probability;
        if rest < 0.0 {
            return *id;
        }
    }
    // Rounding may leave a rest.
    candidates.last().map_or(0, |(id, _)| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(Sampling::Greedy);
        assert_eq!(sampler.choose(&[1.0, 3.0, 3.0, -5.0]), 1);
        assert_eq!(sampler.choose(&[]), 0);
    }

    #[test]
    fn fifty_candidates_and_those_as_likely_as_the_last_stay() {
        let mut logits: Vec<f32> = (0..200).map(|i| -(i as f32)).collect();
        assert_eq!(probabilities(&logits, 1.0).len(), 50);
        (logits[120], logits[130]) = (logits[49], logits[49]);
        let candidates = probabilities(&logits, 0.5);
        assert_eq!(candidates.len(), 52);
        assert_eq!(candidates[49..].iter().map(|(id, _)| *id).collect::<Vec<_>>(), [49, 120, 130]);
        let total: f64 = candidates.iter().map(|(_, p)| p).sum();
        assert!((total - 1.0).abs() < 1e-12);
        // Neighbours differ by 1 / 0.5 in the exponent.
        assert!((candidates[0].1 / candidates[1].1 - 2f64.exp()).abs() < 1e-9);
    }

    #[test]
    fn candidates_are_found_in_any_order_of_logits() {
        let noise = |i: u32| (i.wrapping_mul(2_654_435_761) >> 16) as f32;
        let orders: [fn(u32, &dyn Fn(u32) -> f32) -> f32; 4] =
            [|i, f| f(i), |i, _| i as f32, |i, _| -(i as f32), |_, _| 1.0];
        for (order, expected) in orders.into_iter().zip([50, 50, 50, 5000]) {
            let logits: Vec<f32> = (0..5000).map(|i| order(i, &noise)).collect();
            let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            all.sort_by(descending);
            let found: Vec<u32> = probabilities(&logits, 1.0).iter().map(|(id, _)| *id).collect();
            assert_eq!(found.len(), expected);
            assert_eq!(found, all[..expected].iter().map(|(id, _)| *id).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_draw_follows_the_probabilities() {
        let candidates = [(7, 0.5), (8, 0.3), (9, 0.2)];
        assert_eq!(
            [0.0, 0.49, 0.51, 0.79, 0.81, 0.999_999].map(|u| draw(&candidates, u)),
            [7, 7, 8, 8, 9, 9]
        );
        assert_eq!(draw(&candidates, 1.5), 9);
    }

    #[test]
    fn seeds_decide_the_choices() {
        let logits: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
        let choices = |seed| {
            let mut sampler = Sampler::new(Sampling::Random { temperature: 1.0, seed });
            (0..40).map(|_| sampler.choose(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(choices(1), choices(1));
        assert_ne!(choices(1), choices(2));
        let cold = Sampler::new(Sampling::Random { temperature: 1e-6, seed: 1 }).choose(&logits);
        assert_eq!(cold, greedy(&logits));
    }
}

//! Choosing the next token from logits.
//!
//! With a temperature, logits are divided by it, all but the 50 largest are dropped, and a token is drawn with the
//! probabilities that the softmax gives the others, as transformers does by default. Its random numbers can't be had outside
//! torch (they depend on how it draws from many probabilities at once), so a seed gives another text than in diffusers.

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
    largest(logits, 1).first().map_or(0, |(id, _)| *id)
}

/// The candidates and their probabilities, most likely first. Candidates that are as likely as the last one stay, too.
pub fn probabilities(logits: &[f32], temperature: f32) -> Vec<(u32, f64)> {
    let candidates = largest(logits, TOP_K);
    let first = candidates.first().map_or(0.0, |(_, logit)| f64::from(*logit));
    let weight = |logit: f32| ((f64::from(logit) - first) / f64::from(temperature)).exp();
    let total: f64 = candidates.iter().map(|(_, logit)| weight(*logit)).sum();
    candidates.into_iter().map(|(id, logit)| (id, weight(logit) / total)).collect()
}

/// The `count` largest logits and those equal to the last of them, with their ids, in descending order; equal ones in the
/// order of their ids.
fn largest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let descending = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    // What can't be among the largest is left out at once: nearly all of a vocabulary, after the first few logits.
    let (mut candidates, mut threshold) = (Vec::with_capacity(2 * count), f32::NEG_INFINITY);
    for (id, logit) in (0..).zip(logits) {
        if *logit < threshold {
            continue;
        }
        candidates.push((id, *logit));
        if candidates.len() == candidates.capacity() {
            threshold = keep_largest(&mut candidates, count);
            // Room for as many again, for where many are equal to the last.
            candidates.reserve(candidates.len().max(count));
        }
    }
    keep_largest(&mut candidates, count);
    candidates.sort_unstable_by(descending);
    candidates
}

/// Drops the candidates below the `count` largest. Returns the smallest that is left.
fn keep_largest(candidates: &mut Vec<(u32, f32)>, count: usize) -> f32 {
    if candidates.len() < count {
        return f32::NEG_INFINITY;
    }
    let threshold = candidates.select_nth_unstable_by(count - 1, |a, b| b.1.total_cmp(&a.1)).1.1;
    candidates.retain(|(_, logit)| *logit >= threshold);
    threshold
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
    fn one_pass_keeps_what_sorting_would() {
        let mut random = TorchCpu::new(7);
        for (len, levels) in [(0, 3.0), (1, 3.0), (49, 3.0), (50, 9.0), (51, 9.0), (999, 5.0), (5000, 1e6)] {
            // Few levels have many equal logits.
            let logits: Vec<f32> =
                (0..len).map(|_| (random.uniform_f64() * levels).floor() as f32 - 2.0).collect();
            let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
            let last = sorted.get(TOP_K - 1).map_or(f32::NEG_INFINITY, |last| last.1);
            sorted.retain(|(_, logit)| *logit >= last);
            assert_eq!(largest(&logits, TOP_K), sorted, "{len} logits");
        }
        let rising: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        assert_eq!(largest(&rising, 2), [(999, 999.0), (998, 998.0)]);
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        let candidates = probabilities(&[1.0, 30.0, 2.0], 1e-40);
        assert_eq!(candidates[0], (1, 1.0));
        assert!(candidates[1..].iter().all(|(_, probability)| *probability == 0.0));
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

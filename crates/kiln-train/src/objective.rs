//! The training objective: a noised example, and the velocity that leads back.
//!
//! `x = (1 - σ) · latents + σ · noise`, and the model is to predict `noise - latents`. The loss is the mean squared error over all
//! image tokens of a batch.

use kiln_family::Shift;
use kiln_nn::schedule;
use kiln_tensor::HostTensor;
use kiln_tensor::rng::TorchCpu;

use crate::adapter::derive;
use crate::{Error, Example, Result, SigmaSampling, TrainSettings};

/// Which of a step's random numbers a seed is for.
const NOISE: u64 = 1;

/// An example with its noise.
#[derive(Clone, Debug)]
pub struct NoisyExample<'a> {
    /// The clean example.
    pub example: &'a Example,
    /// Noise of the latents' shape.
    pub noise: HostTensor,
    /// The noise level, from 0 to 1.
    pub sigma: f32,
}

impl<'a> NoisyExample<'a> {
    /// Draws noise and its level.
    pub fn draw(example: &'a Example, settings: &TrainSettings, seed: u64) -> Result<Self> {
        let mut random = TorchCpu::new(seed);
        let sigma = settings.sigmas.draw(&settings.family.shift, example.height * example.width, &mut random);
        NoisyExample::at(example, sigma, &mut random)
    }

    /// Draws noise for a given level.
    pub fn with_sigma(example: &'a Example, sigma: f32, seed: u64) -> Result<Self> {
        NoisyExample::at(example, sigma, &mut TorchCpu::new(seed))
    }

    fn at(example: &'a Example, sigma: f32, random: &mut TorchCpu) -> Result<Self> {
        let shape = example.latents.shape();
        let noise = HostTensor::from_f32(shape.clone(), random.randn(shape.numel()))?;
        Ok(NoisyExample { example, noise, sigma })
    }

    /// Adds the noise.
    pub fn prepare(&self) -> Result<PreparedExample> {
        let (latents, noise) = (self.example.latents.to_f32()?, self.noise.to_f32()?);
        let pairs = || latents.iter().zip(noise.iter());
        let noised = pairs().map(|(x, noise)| (1.0 - self.sigma) * x + self.sigma * noise).collect();
        let velocity = pairs().map(|(x, noise)| noise - x).collect();
        let tensor = |values| HostTensor::from_f32(self.example.latents.shape().clone(), values);
        let (noised, velocity) = (tensor(noised)?, tensor(velocity)?);
        Ok(PreparedExample { example: self.example.clone(), noised, velocity, sigma: self.sigma })
    }
}

/// An example with its noise added: what the model sees in a step, and what it is to predict.
#[derive(Clone, Debug)]
pub struct PreparedExample {
    pub(crate) example: Example,
    /// The noised latents.
    pub(crate) noised: HostTensor,
    /// The velocity to predict.
    pub(crate) velocity: HostTensor,
    /// The noise level.
    pub(crate) sigma: f32,
}

impl TrainSettings {
    /// Draws the noise of a step's batches, counted from 0. It follows from the seed alone, so that the examples of a step can be
    /// prepared while the step before is computed.
    pub fn prepare(&self, step: u64, batches: &[&[Example]]) -> Result<Vec<Vec<PreparedExample>>> {
        let example = |i: usize, j: usize, example: &Example| {
            let seed = derive(&[self.seed, NOISE, step, i as u64, j as u64]);
            NoisyExample::draw(example, self, seed)?.prepare()
        };
        let batch = |(i, batch): (usize, &&[Example])| {
            batch.iter().enumerate().map(|(j, e)| example(i, j, e)).collect::<Result<Vec<_>>>()
        };
        batches.iter().enumerate().map(batch).collect()
    }
}

impl SigmaSampling {
    /// Draws a noise level for an image of this many tokens, shifted as its family is.
    pub fn draw(&self, by: &Shift, tokens: usize, random: &mut TorchCpu) -> f32 {
        match self {
            SigmaSampling::LogitNormal { mean, std, shift } => {
                let mu = if *shift { schedule::training_mu(by, tokens) } else { 0.0 };
                let logit = f64::from(*mean) + f64::from(*std) * normal(random) + mu;
                (1.0 / (1.0 + (-logit).exp())) as f32
            }
            SigmaSampling::Uniform => random.uniform_f64() as f32,
            SigmaSampling::List { sigmas } => {
                let index = (random.uniform_f64() * sigmas.len() as f64) as usize;
                sigmas[index.min(sigmas.len() - 1)]
            }
        }
    }

    /// Fails if no level could be drawn.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            SigmaSampling::LogitNormal { mean, std, .. }
                if !(mean.is_finite() && *std >= 0.0 && std.is_finite()) =>
            {
                Err(Error::Settings(format!("the noise levels' logit has mean {mean} and deviation {std}")))
            }
            SigmaSampling::List { sigmas } if sigmas.is_empty() => {
                Err(Error::Settings("the list of noise levels is empty".into()))
            }
            SigmaSampling::List { sigmas } => match sigmas.iter().find(|s| !(**s > 0.0 && **s <= 1.0)) {
                Some(sigma) => {
                    Err(Error::Settings(format!("the noise level {sigma} is not above 0 and at most 1")))
                }
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

/// One normal number, by Box and Muller.
fn normal(random: &mut TorchCpu) -> f64 {
    let (u, v) = (1.0 - random.uniform_f64(), random.uniform_f64());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use kiln_family::flux2::FLUX2;

    use super::*;

    fn mean_logit(sampling: &SigmaSampling, tokens: usize) -> f64 {
        let mut random = TorchCpu::new(7);
        let draw = |_| {
            let sigma = f64::from(sampling.draw(&FLUX2.shift, tokens, &mut random));
            (sigma / (1.0 - sigma)).ln()
        };
        (0..4000).map(draw).sum::<f64>() / 4000.0
    }

    #[test]
    fn levels_are_shifted_by_the_number_of_tokens() {
        let sampling = SigmaSampling::default();
        for (tokens, mu) in [(256, 0.5), (1024, 0.63), (4096, 1.15)] {
            let found = mean_logit(&sampling, tokens);
            assert!((found - mu).abs() < 0.05, "{tokens} tokens: {found}, expected {mu}");
        }
        let plain = SigmaSampling::LogitNormal { mean: 0.0, std: 1.0, shift: false };
        assert!(mean_logit(&plain, 4096).abs() < 0.05);
    }

    #[test]
    fn lists_are_drawn_from_evenly() {
        let sampling = SigmaSampling::List { sigmas: vec![0.25, 0.5, 1.0] };
        let mut random = TorchCpu::new(1);
        let mut counts = [0; 3];
        for _ in 0..3000 {
            let sigma = sampling.draw(&FLUX2.shift, 1, &mut random);
            counts[[0.25, 0.5, 1.0].iter().position(|s| *s == sigma).unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
        assert!(SigmaSampling::List { sigmas: vec![1.5] }.check().is_err());
    }
}

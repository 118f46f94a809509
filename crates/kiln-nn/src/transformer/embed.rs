//! The timestep (and guidance) embedding: `t → sinusoids [1, channels] → MLP → [1, dim]`.
//!
//! Only the sinusoids are computed on the host; they are an input of a forward pass, so that a recorded one can be replayed.

use kiln_ops::{Activation, Backend};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Vars;

use super::config::Config;
use super::linear::Linear;
use crate::{ResidencyPlan, Result};

/// The MLPs of `time_guidance_embed`.
#[derive(Clone)]
pub(super) struct TimestepEmbedder<B: Backend> {
    channels: usize,
    timestep_embedder: Mlp<B>,
    guidance_embedder: Option<Mlp<B>>,
}

/// Timestep and guidance as sinusoids, `[1, channels]` each.
pub(super) struct TimestepProjection<B: Backend> {
    pub(super) timestep: B::Tensor,
    /// Only if the model has an embedder for it.
    pub(super) guidance: Option<B::Tensor>,
}

/// The embedding, `[1, dim]`, and its SiLU, the input of all modulations.
pub(super) struct TimestepEmbedding<B: Backend> {
    pub(super) embedding: B::Tensor,
    pub(super) silu: B::Tensor,
}

impl<B: Backend> TimestepEmbedder<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        let guidance =
            config.guidance_embeds.then(|| Mlp::load(b, &vars.at("guidance_embedder"), plan, config));
        Ok(TimestepEmbedder {
            channels: config.timestep_guidance_channels,
            timestep_embedder: Mlp::load(b, &vars.at("timestep_embedder"), plan, config)?,
            guidance_embedder: guidance.transpose()?,
        })
    }

    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut Linear<B>> {
        let embedders = std::iter::once(&mut self.timestep_embedder).chain(&mut self.guidance_embedder);
        embedders.flat_map(|mlp| [&mut mlp.linear_1, &mut mlp.linear_2])
    }

    /// Computes the sinusoids. `timestep` is `t / 1000`; models without an embedder for guidance ignore it.
    pub(super) fn project(
        &self,
        b: &B,
        timestep: f32,
        guidance: Option<f32>,
    ) -> Result<TimestepProjection<B>> {
        let upload = |value: f32| -> Result<B::Tensor> {
            Ok(b.upload(&sinusoid(value * 1000.0, self.channels)?, DType::F32)?)
        };
        let guidance = guidance.filter(|_| self.guidance_embedder.is_some());
        Ok(TimestepProjection { timestep: upload(timestep)?, guidance: guidance.map(upload).transpose()? })
    }

    pub(super) fn forward(&self, b: &B, projection: &TimestepProjection<B>) -> Result<TimestepEmbedding<B>> {
        let mut embedding = self.timestep_embedder.forward(b, &projection.timestep)?;
        if let (Some(embedder), Some(guidance)) = (&self.guidance_embedder, &projection.guidance) {
            embedding = b.add(&embedding, &embedder.forward(b, guidance)?)?;
        }
        let silu = b.activation(&embedding, Activation::Silu)?;
        Ok(TimestepEmbedding { embedding, silu })
    }
}

/// Linear, SiLU, linear.
#[derive(Clone)]
struct Mlp<B: Backend> {
    linear_1: Linear<B>,
    linear_2: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        let dim = config.dim();
        Ok(Mlp {
            linear_1: Linear::load(b, vars, plan, "linear_1", dim, config.timestep_guidance_channels)?,
            linear_2: Linear::load(b, vars, plan, "linear_2", dim, dim)?,
        })
    }

    fn forward(&self, b: &B, x: &B::Tensor) -> Result<B::Tensor> {
        let h = b.linear(x, &self.linear_1)?;
        Ok(b.linear(&b.activation(&h, Activation::Silu)?, &self.linear_2)?)
    }
}

/// Those of FLUX.2's 128 frequencies that torch's `exp` (accurate to 0.53 ulp) rounds up, although the exact value lies just
/// below the midpoint.
const ROUNDED_UP: [usize; 3] = [13, 44, 119];

/// Computes `[cos(t·f₀), …, sin(t·f₀), …]` with `fᵢ = 10000^(-i / half)`.
///
/// The frequencies are bit-exact with torch: at t = 4000, one bit of a frequency changes its cosine by 1e-4, which would
/// be the largest difference to diffusers in the whole pipeline.
fn sinusoid(t: f32, channels: usize) -> Result<HostTensor> {
    let half = channels / 2;
    let angles = (0..half).map(|i| {
        let exponent = (-(10000f64.ln()) as f32 * i as f32) / half as f32;
        let frequency = f64::from(exponent).exp() as f32;
        t * if half == 128 && ROUNDED_UP.contains(&i) { frequency.next_up() } else { frequency }
    });
    let (cos, sin): (Vec<f32>, Vec<f32>) =
        angles.map(|a| (f64::from(a).cos() as f32, f64::from(a).sin() as f32)).unzip();
    Ok(HostTensor::from_f32([1, channels], [cos, sin].concat())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `reference/oracles.safetensors` of the golden set has the output of diffusers' `Timesteps`.
    #[test]
    fn sinusoids_equal_those_of_diffusers() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/reference/oracles.safetensors");
        let oracles = kiln_weights::WeightSource::open(file).unwrap();
        let values = |name: &str| oracles.tensor(name).unwrap().to_f32().unwrap().into_owned();
        let (timesteps, expected) = (values("timesteps"), values("timestep_embedding"));
        for (t, expected) in timesteps.iter().zip(expected.chunks_exact(256)) {
            let ours = sinusoid(*t, 256).unwrap();
            for (a, b) in ours.to_f32().unwrap().iter().zip(expected) {
                assert!((a - b).abs() < 2e-7, "t = {t}: {a}, expected {b}");
            }
        }
    }
}

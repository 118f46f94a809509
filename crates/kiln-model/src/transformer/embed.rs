use kiln_ops::{Activation, Backend, Groups};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::Vars;

use super::config::Config;
use super::linear::Linear;
use super::runs::Runs;
use crate::{ResidencyPlan, Result};

/// The noise level (and guidance) as a vector: sinusoids, then a small MLP each.
pub(super) struct TimeEmbedding<B: Backend> {
    channels: usize,
    timestep_embedder: Mlp<B>,
    guidance_embedder: Option<Mlp<B>>,
}

/// A noise level (and guidance) as sinusoids, `[1, channels]` each: all that a call of the transformer takes from the host.
pub(super) struct Moment<B: Backend> {
    pub(super) timestep: B::Tensor,
    /// Where the model has an embedder for it.
    pub(super) guidance: Option<B::Tensor>,
}

/// The embedding, `[1, dim]`, and its SiLU, which is what every modulation starts from.
pub(super) struct Time<B: Backend> {
    pub(super) embedding: B::Tensor,
    pub(super) silu: B::Tensor,
}

impl<B: Backend> TimeEmbedding<B> {
    pub(super) fn load(b: &B, vars: &Vars<'_>, plan: &ResidencyPlan, config: &Config) -> Result<Self> {
        let guidance =
            config.guidance_embeds.then(|| Mlp::load(b, &vars.at("guidance_embedder"), plan, config));
        Ok(TimeEmbedding {
            channels: config.timestep_guidance_channels,
            timestep_embedder: Mlp::load(b, &vars.at("timestep_embedder"), plan, config)?,
            guidance_embedder: guidance.transpose()?,
        })
    }

    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut Linear<B>> {
        let embedders = std::iter::once(&mut self.timestep_embedder).chain(&mut self.guidance_embedder);
        embedders.flat_map(|mlp| [&mut mlp.linear_1, &mut mlp.linear_2])
    }

    /// `timestep` is `t / 1000`; guidance is ignored by models without an embedder for it.
    pub(super) fn moment(&self, b: &B, timestep: f32, guidance: Option<f32>) -> Result<Moment<B>> {
        let upload = |value: f32| -> Result<B::Tensor> {
            Ok(b.upload(&sinusoid(value * 1000.0, self.channels)?, DType::F32)?)
        };
        let guidance = guidance.filter(|_| self.guidance_embedder.is_some());
        Ok(Moment { timestep: upload(timestep)?, guidance: guidance.map(upload).transpose()? })
    }

    pub(super) fn forward(&self, b: &B, moment: &Moment<B>) -> Result<Time<B>> {
        let mut embedding = self.timestep_embedder.forward(b, &moment.timestep)?;
        if let (Some(embedder), Some(guidance)) = (&self.guidance_embedder, &moment.guidance) {
            embedding = b.add(&embedding, &embedder.forward(b, guidance)?)?;
        }
        let silu = b.activation(&embedding, Activation::Silu)?;
        Ok(Time { embedding, silu })
    }
}

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

/// Frequencies of the 128 that every FLUX.2 has which torch's `exp` (good to 0.53 units in the last place) rounds up
/// although the exact value lies just below the middle.
const ROUNDED_UP: [usize; 3] = [13, 44, 119];

/// `[cos(t·f₀), …, sin(t·f₀), …]` with `fᵢ = 10000^(-i / half)`.
///
/// The frequencies are torch's to the last bit: at t = 4000 one bit of a frequency is 1e-4 in its cosine, which would
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

/// Shift, scale and gate of a sub-block, `[groups, dim]` each.
pub(super) struct Modulation<B: Backend> {
    pub(super) shift: B::Tensor,
    pub(super) scale: B::Tensor,
    pub(super) gate: B::Tensor,
}

/// A double block's modulations: of its attention and of its MLP.
pub(super) struct DoubleModulation<B: Backend> {
    pub(super) attn: Modulation<B>,
    pub(super) mlp: Modulation<B>,
    pub(super) groups: Groups,
}

/// A single block's modulation.
pub(super) struct SingleModulation<B: Backend> {
    pub(super) block: Modulation<B>,
    pub(super) groups: Groups,
}

/// The layer that turns the time embedding into the modulations of `sets` sub-blocks.
pub(super) struct ModulationSource<B: Backend> {
    linear: Linear<B>,
    dim: usize,
}

impl<B: Backend> ModulationSource<B> {
    pub(super) fn load(
        b: &B,
        vars: &Vars<'_>,
        plan: &ResidencyPlan,
        sets: usize,
        dim: usize,
    ) -> Result<Self> {
        Ok(ModulationSource { linear: Linear::load(b, vars, plan, "linear", 3 * sets * dim, dim)?, dim })
    }

    pub(super) fn linear(&mut self) -> &mut Linear<B> {
        &mut self.linear
    }

    /// `runs` says which rows get which level.
    pub(super) fn double(&self, b: &B, levels: &Levels<'_, B>, runs: &Runs) -> Result<DoubleModulation<B>> {
        let [shift, scale, gate, mlp_shift, mlp_scale, mlp_gate] = self.forward(b, levels, runs)?;
        Ok(DoubleModulation {
            attn: Modulation { shift, scale, gate },
            mlp: Modulation { shift: mlp_shift, scale: mlp_scale, gate: mlp_gate },
            groups: runs.groups(),
        })
    }

    /// See [`ModulationSource::double`].
    pub(super) fn single(&self, b: &B, levels: &Levels<'_, B>, runs: &Runs) -> Result<SingleModulation<B>> {
        let [shift, scale, gate] = self.forward(b, levels, runs)?;
        Ok(SingleModulation { block: Modulation { shift, scale, gate }, groups: runs.groups() })
    }

    /// Each of the `N` parts, a row for every run. The product has a row for each level, however many runs there are.
    fn forward<const N: usize>(&self, b: &B, levels: &Levels<'_, B>, runs: &Runs) -> Result<[B::Tensor; N]> {
        let Levels { now, still } = *levels;
        let x = if runs.any_still() { b.concat_rows(&[now, still])? } else { now.clone() };
        let mut parts = b.linear_split(&x, &self.linear, [self.dim; N])?;
        if runs.any_still() {
            for part in &mut parts {
                let rows = [b.slice_rows(part, 0..1)?, b.slice_rows(part, 1..2)?];
                let rows: Vec<_> = runs.levels().map(|level| &rows[level as usize]).collect();
                *part = b.concat_rows(&rows)?;
            }
        }
        Ok(parts)
    }
}

/// The time embedding after SiLU, of this step and of t = 0.
pub(super) struct Levels<'a, B: Backend> {
    pub(super) now: &'a B::Tensor,
    pub(super) still: &'a B::Tensor,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `reference/oracles.safetensors` of the golden set: what diffusers' `Timesteps` gives.
    #[test]
    fn the_sinusoid_is_diffusers_own() {
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

//! The noise schedule: the sigmas of the denoising steps.
//!
//! `linspace(1, 1/n, n)` is shifted towards high noise by an amount that depends on the number of image tokens and steps
//! ([`empirical_mu`]), and ends with a 0. Arithmetic is f32 where diffusers (numpy) uses f32, so that the sigmas are
//! bit-exact with its own.

use kiln_family::{Shift, default_family};
use serde::Deserialize;

/// How the sigmas are spaced.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum SigmaSpacing {
    /// `linspace(1, 1/n, n)` with the resolution-dependent shift, as the models are trained.
    #[default]
    Shifted,
    /// `linspace(1, 0, n + 1)^(1/rho)`, not shifted.
    Power {
        /// Inverse of the exponent: 1 is linear, more stays longer at high noise.
        rho: f32,
    },
}

/// The only scheduler of FLUX.2, in diffusers.
pub const SCHEDULER: &str = "FlowMatchEulerDiscreteScheduler";

/// The fields of `scheduler/scheduler_config.json` that affect the sigmas.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct SchedulerConfig {
    /// The scheduler; FLUX.2 uses flow-match Euler only.
    #[serde(rename = "_class_name")]
    pub class_name: String,
    /// The timestep of sigma 1.
    pub num_train_timesteps: usize,
    /// Whether the shift depends on the image size and the number of steps.
    pub use_dynamic_shifting: bool,
    /// The fixed shift, if it does not.
    pub shift: f32,
    /// `exponential` is the only kind FLUX.2 uses.
    pub time_shift_type: String,
    /// A last sigma to stretch to; FLUX.2 has none.
    pub shift_terminal: Option<f32>,
    /// Another spacing, which FLUX.2 does not use.
    pub use_karras_sigmas: Option<bool>,
    /// See `use_karras_sigmas`.
    pub use_exponential_sigmas: Option<bool>,
    /// See `use_karras_sigmas`.
    pub use_beta_sigmas: Option<bool>,
    /// See `use_karras_sigmas`.
    pub invert_sigmas: bool,
    /// Whether noise is added in every step, which FLUX.2 does not use.
    pub stochastic_sampling: Option<bool>,
    /// The shift that depends on the image size and the number of steps: the family's.
    #[serde(skip)]
    pub dynamic_shift: Shift,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        SchedulerConfig {
            class_name: SCHEDULER.into(),
            num_train_timesteps: 1000,
            use_dynamic_shifting: true,
            shift: 3.0,
            time_shift_type: "exponential".into(),
            shift_terminal: None,
            use_karras_sigmas: None,
            use_exponential_sigmas: None,
            use_beta_sigmas: None,
            invert_sigmas: false,
            stochastic_sampling: None,
            dynamic_shift: default_family().shift,
        }
    }
}

impl SchedulerConfig {
    /// Names the first setting that is not supported, if there is one.
    pub fn unsupported(&self) -> Option<String> {
        let enabled = |flag: Option<bool>| flag == Some(true);
        let unsupported = [
            (self.class_name != SCHEDULER, "a scheduler other than `FlowMatchEulerDiscreteScheduler`"),
            (self.num_train_timesteps != 1000, "num_train_timesteps other than 1000"),
            (!(self.shift.is_finite() && self.shift > 0.0), "a shift that is not above 0"),
            (self.time_shift_type != "exponential", "time_shift_type other than `exponential`"),
            (self.shift_terminal.is_some_and(|v| v != 0.0), "shift_terminal"),
            (enabled(self.use_karras_sigmas), "use_karras_sigmas"),
            (enabled(self.use_exponential_sigmas), "use_exponential_sigmas"),
            (enabled(self.use_beta_sigmas), "use_beta_sigmas"),
            (self.invert_sigmas, "invert_sigmas"),
            (enabled(self.stochastic_sampling), "stochastic_sampling"),
        ];
        unsupported.iter().find(|(is_set, _)| *is_set).map(|(_, name)| format!("{name} is not supported"))
    }
}

/// The sigmas of one run: `sigmas[i]` is the noise level before step `i`; the last is 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    sigmas: Vec<f32>,
}

impl Schedule {
    /// Computes the sigmas for an image of `tokens` tokens in `steps` steps.
    ///
    /// `custom` replaces the evenly spaced sigmas and, like them, is shifted unless the spacing is a power. There is at least
    /// one step; sigmas decrease, from 1 at most, and are above 0, and so is the exponent of a power.
    pub fn new(
        config: &SchedulerConfig,
        spacing: SigmaSpacing,
        tokens: usize,
        steps: usize,
        custom: Option<&[f32]>,
    ) -> Schedule {
        let mut sigmas = match (spacing, custom) {
            (SigmaSpacing::Power { .. }, Some(custom)) => custom.to_vec(),
            (SigmaSpacing::Power { rho }, None) => {
                (0..steps).map(|i| power(1.0 - i as f32 / steps as f32, 1.0 / rho)).collect()
            }
            (SigmaSpacing::Shifted, Some(custom)) => shift(config, tokens, steps, custom),
            (SigmaSpacing::Shifted, None) => shift(config, tokens, steps, &linspace(steps)),
        };
        sigmas.push(0.0);
        Schedule { sigmas }
    }

    /// Computes the sigmas of an image that starts at the noise level `sigma` instead of 1: that part of the model's
    /// schedule of `whole_steps` steps, in `steps` steps.
    pub fn from_level(
        config: &SchedulerConfig,
        spacing: SigmaSpacing,
        tokens: usize,
        whole_steps: usize,
        steps: usize,
        sigma: f64,
    ) -> Schedule {
        let sigma = sigma as f32;
        let part = |first: f32| (0..steps).map(move |i| first * (1.0 - i as f32 / steps as f32));
        let mut sigmas: Vec<f32> = match spacing {
            SigmaSpacing::Power { rho } => part(1.0).map(|t| sigma * power(t, 1.0 / rho)).collect(),
            SigmaSpacing::Shifted => {
                let factor = shift_factor(config, tokens, whole_steps);
                // The level before shifting.
                let first = sigma / (factor - (factor - 1.0) * sigma);
                part(first).map(|t| factor * t / (1.0 + (factor - 1.0) * t)).collect()
            }
        };
        sigmas.push(0.0);
        Schedule { sigmas }
    }

    /// The sigmas, including the last 0.
    pub fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// Returns the transformer's input for a sigma: `t / 1000`, computed through `t` in f32 as diffusers does.
    pub fn timestep(sigma: f32) -> f32 {
        (sigma * 1000.0) / 1000.0
    }

    /// Returns the first step of image-to-image with `strength`, as diffusers' pipelines count. With strength 0, which
    /// diffusers refuses, no step is left: the image stays as it is.
    pub fn first_step(&self, strength: f64) -> usize {
        let steps = self.steps() as f64;
        (steps - (steps * strength).min(steps)).max(0.0) as usize
    }
}

/// Computes `t^exponent` in f64, because the C libraries' functions in f32 differ by platform.
fn power(t: f32, exponent: f32) -> f32 {
    f64::from(t).powf(exponent.into()) as f32
}

/// Computes `linspace(1, 1/n, n)` as numpy does: in f64, then rounded.
fn linspace(n: usize) -> Vec<f32> {
    let stop = 1.0 / n as f64;
    let step = if n > 1 { (stop - 1.0) / (n - 1) as f64 } else { 0.0 };
    (0..n).map(|i| if i + 1 == n && n > 1 { stop as f32 } else { (i as f64 * step + 1.0) as f32 }).collect()
}

fn shift(config: &SchedulerConfig, tokens: usize, steps: usize, sigmas: &[f32]) -> Vec<f32> {
    let s = shift_factor(config, tokens, steps);
    if !config.use_dynamic_shifting {
        return sigmas.iter().map(|&t| s * t / (1.0 + (s - 1.0) * t)).collect();
    }
    // The same function, rounded as diffusers does.
    sigmas.iter().map(|&t| s / (s + (1.0 / t - 1.0))).collect()
}

/// Returns the factor by which the odds of noise grow: `sigma / (1 - sigma) = factor · t / (1 - t)`.
fn shift_factor(config: &SchedulerConfig, tokens: usize, steps: usize) -> f32 {
    if config.use_dynamic_shifting {
        empirical_mu(&config.dynamic_shift, tokens, steps).exp() as f32
    } else {
        config.shift
    }
}

/// The shift that a family was trained with, for an image of this many tokens. Inference uses [`empirical_mu`] instead.
pub fn training_mu(shift: &Shift, tokens: usize) -> f64 {
    let [[first, low], [last, high]] = shift.training;
    low + (tokens as f64 - first) * (high - low) / (last - first)
}

/// Computes a family's empirical shift: two linear functions of the token count, interpolated by the step count.
pub fn empirical_mu(shift: &Shift, tokens: usize, steps: usize) -> f64 {
    let tokens = tokens as f64;
    let line = |[slope, offset]: [f64; 2]| slope * tokens + offset;
    let at_200 = line(shift.at_200_steps);
    if tokens > shift.max_tokens {
        return at_200;
    }
    let at_10 = line(shift.at_10_steps);
    let slope = (at_200 - at_10) / 190.0;
    slope * steps as f64 + (at_200 - 200.0 * slope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_from_a_level_is_a_part_of_the_whole_one() {
        let config = SchedulerConfig::default();
        for fixed in [true, false] {
            let config = SchedulerConfig { use_dynamic_shifting: !fixed, ..config.clone() };
            let whole = Schedule::new(&config, SigmaSpacing::Shifted, 1024, 8, None);
            let level = f64::from(whole.sigmas()[5]);
            let part = Schedule::from_level(&config, SigmaSpacing::Shifted, 1024, 8, 3, level);
            for (found, expected) in part.sigmas().iter().zip(&whole.sigmas()[5..]) {
                assert!((found - expected).abs() < 1e-5, "{part:?} {whole:?}");
            }
        }
        let power = SigmaSpacing::Power { rho: 1.0 };
        let part = Schedule::from_level(&config, power, 1024, 8, 2, 0.5);
        assert_eq!(part.sigmas(), [0.5, 0.25, 0.0]);
    }
}

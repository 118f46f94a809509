//! The optimizers' state, and one step for all parameters.

use kiln_ops::training::{AdamWStep, AdamWTensor, ProdigyStep, ProdigyTensor, QuantizedAdamWTensor};
use kiln_ops::{Tensor as _, TrainingBackend};
use kiln_tensor::{DType, HostTensor};

use crate::adapter::Param;
use crate::moments8::Moments8;
use crate::state::{NAMES, upload};
use crate::{Error, Optimizer, Result, TrainerState};

/// An optimizer with the state of every parameter, in the order of the parameters.
pub(crate) struct OptimizerState<B: TrainingBackend> {
    settings: Optimizer,
    moments: Moments<B>,
}

enum Moments<B: TrainingBackend> {
    /// First and second moment.
    Full(Vec<[B::Tensor; 2]>),
    /// The same in 8 bits, of large tensors.
    Quantized(Vec<Moments8<B>>),
    Prodigy(Vec<ProdigyMoments<B>>, Distance),
}

struct ProdigyMoments<B: TrainingBackend> {
    start: B::Tensor,
    /// First and second moment, and the sum of gradients.
    moments: [B::Tensor; 3],
}

/// Prodigy's estimate of the distance to a solution.
#[derive(Clone, Copy)]
struct Distance {
    d: f64,
    largest: f64,
    numerator: f64,
}

impl<B: TrainingBackend> OptimizerState<B> {
    /// The state before the first step.
    pub(crate) fn new<'a>(
        b: &B,
        settings: Optimizer,
        params: impl Iterator<Item = (String, &'a Param<B>)>,
    ) -> Result<Self>
    where
        B: 'a,
    {
        let zeros = |param: &Param<B>| b.zeros(param.value.shape().clone(), DType::F32);
        let moments = match settings {
            Optimizer::AdamW { .. } => {
                let both = |(_, p): (String, &Param<B>)| Ok([zeros(p)?, zeros(p)?]);
                Moments::Full(params.map(both).collect::<Result<_>>()?)
            }
            Optimizer::AdamW8bit { .. } => {
                let both = |(_, p): (String, &Param<B>)| Moments8::new(b, p.value.shape());
                Moments::Quantized(params.map(both).collect::<Result<_>>()?)
            }
            Optimizer::Prodigy { d0, .. } => {
                let all = |(_, p): (String, &Param<B>)| {
                    Ok(ProdigyMoments { start: p.value.clone(), moments: [zeros(p)?, zeros(p)?, zeros(p)?] })
                };
                let d = f64::from(d0);
                let distance = Distance { d, largest: d, numerator: 0.0 };
                Moments::Prodigy(params.map(all).collect::<Result<_>>()?, distance)
            }
        };
        Ok(OptimizerState { settings, moments })
    }

    /// Takes step `step` (from 1) with gradients scaled by `grad_scale`; returns the effective learning rate.
    pub(crate) fn step(
        &mut self,
        b: &B,
        mut params: Vec<&mut Param<B>>,
        lr: f32,
        step: u64,
        grad_scale: f32,
    ) -> Result<f32> {
        match (&mut self.moments, self.settings) {
            (Moments::Full(moments), Optimizer::AdamW { betas, eps, weight_decay }) => {
                let step = AdamWStep { lr, betas, eps, decay: weight_decay, step, grad_scale };
                let pairs = params.iter_mut().zip(moments);
                let mut tensors: Vec<_> = pairs
                    .filter_map(|(param, [m, v])| {
                        let Param { value, grad, .. } = &mut **param;
                        Some(AdamWTensor { param: value, grad: grad.as_ref()?, m, v })
                    })
                    .collect();
                b.adamw(&mut tensors, &step)?;
            }
            (Moments::Quantized(moments), Optimizer::AdamW8bit { betas, eps, weight_decay }) => {
                let step = AdamWStep { lr, betas, eps, decay: weight_decay, step, grad_scale };
                let (mut small, mut large) = (Vec::new(), Vec::new());
                for (param, moments) in params.iter_mut().zip(moments) {
                    let Param { value: param, grad: Some(grad), .. } = &mut **param else { continue };
                    match moments {
                        Moments8::Small([m, v]) => small.push(AdamWTensor { param, grad, m, v }),
                        Moments8::Large([m, v]) => large.push(QuantizedAdamWTensor { param, grad, m, v }),
                    }
                }
                b.adamw(&mut small, &step)?;
                b.adamw_8bit(&mut large, &step)?;
            }
            (Moments::Prodigy(moments, distance), settings @ Optimizer::Prodigy { .. }) => {
                return prodigy(b, params, moments, distance, settings, lr, step, grad_scale);
            }
            _ => return Err(Error::State("the saved state is that of another optimizer".into())),
        }
        Ok(lr)
    }

    /// Adds the state to a saved one; `names` are those of the parameters.
    pub(crate) fn save(&self, b: &B, names: &[String], state: &mut TrainerState) -> Result<()> {
        let mut put = |name: String, host: HostTensor| state.tensors.insert(name, host);
        match &self.moments {
            Moments::Full(moments) => {
                for (name, both) in names.iter().zip(moments) {
                    for (kind, tensor) in NAMES.iter().zip(both) {
                        put(format!("optimizer.{kind}.{name}"), b.download(tensor)?);
                    }
                }
            }
            Moments::Quantized(moments) => {
                for (name, moments) in names.iter().zip(moments) {
                    moments.save(b, name, state)?;
                }
            }
            Moments::Prodigy(moments, distance) => {
                for (name, all) in names.iter().zip(moments) {
                    put(format!("optimizer.start.{name}"), b.download(&all.start)?);
                    for (kind, tensor) in NAMES.iter().zip(&all.moments) {
                        put(format!("optimizer.{kind}.{name}"), b.download(tensor)?);
                    }
                }
                let numbers =
                    [("d", distance.d), ("largest", distance.largest), ("numerator", distance.numerator)];
                state.numbers.extend(numbers.map(|(name, value)| (format!("prodigy.{name}"), value)));
            }
        }
        Ok(())
    }

    /// Replaces the state by a saved one.
    pub(crate) fn restore(&mut self, b: &B, names: &[String], state: &TrainerState) -> Result<()> {
        let upload = |to: &mut B::Tensor, name: String| upload(b, to, &name, state);
        match &mut self.moments {
            Moments::Full(moments) => {
                for (name, both) in names.iter().zip(moments) {
                    for (kind, tensor) in NAMES.iter().zip(both) {
                        upload(tensor, format!("optimizer.{kind}.{name}"))?;
                    }
                }
            }
            Moments::Quantized(moments) => {
                for (name, moments) in names.iter().zip(moments) {
                    moments.restore(b, name, state)?;
                }
            }
            Moments::Prodigy(moments, distance) => {
                for (name, all) in names.iter().zip(moments) {
                    upload(&mut all.start, format!("optimizer.start.{name}"))?;
                    for (kind, tensor) in NAMES.iter().zip(&mut all.moments) {
                        upload(tensor, format!("optimizer.{kind}.{name}"))?;
                    }
                }
                let number = |name: &str| {
                    let missing = || Error::State(format!("the state has no number `prodigy.{name}`"));
                    state.numbers.get(&format!("prodigy.{name}")).copied().ok_or_else(missing)
                };
                *distance = Distance {
                    d: number("d")?,
                    largest: number("largest")?,
                    numerator: number("numerator")?,
                };
            }
        }
        Ok(())
    }
}

/// A step of Prodigy (Mishchenko and Defazio): the distance grows with the gradients' agreement, the rest is AdamW on gradients
/// scaled by it. Bias correction and safeguarded warm-up are on, as is usual for LoRAs.
#[expect(clippy::too_many_arguments, reason = "the optimizer's state, taken apart")]
fn prodigy<B: TrainingBackend>(
    b: &B,
    mut params: Vec<&mut Param<B>>,
    moments: &mut [ProdigyMoments<B>],
    distance: &mut Distance,
    settings: Optimizer,
    lr: f32,
    step: u64,
    grad_scale: f32,
) -> Result<f32> {
    let Optimizer::Prodigy { betas: [beta1, beta2], eps, weight_decay, d0, d_coef } = settings else {
        return Err(Error::State("the saved state is that of another optimizer".into()));
    };
    let beta3 = beta2.sqrt();
    let (d, d0) = (distance.d, f64::from(d0));
    let remaining = |beta: f32| 1.0 - f64::from(beta).powf(step as f64);
    let rate = d * f64::from(lr) * remaining(beta2).sqrt() / remaining(beta1);
    let first =
        ProdigyStep { betas: [beta1, beta2, beta3], d: d as f32, s_factor: (d / d0 * d) as f32, grad_scale };
    let pairs = params.iter_mut().zip(moments);
    let mut tensors: Vec<_> = pairs
        .filter_map(|(param, all)| {
            let Param { value, grad, .. } = &mut **param;
            let ProdigyMoments { start, moments: [m, v, s] } = all;
            Some(ProdigyTensor { param: value, grad: grad.as_ref()?, start, m, v, s })
        })
        .collect();
    let sums = b.download(&b.prodigy_moments(&mut tensors, &first)?)?;
    let [numerator, denominator] = [0, 1].map(|i| sums.to_f32().map(|sums| f64::from(sums[i])));
    let (numerator, denominator) = (numerator?, denominator?);
    distance.numerator = f64::from(beta3) * distance.numerator + d / d0 * rate * numerator;
    // No gradient at all: nothing to learn from.
    if denominator == 0.0 {
        return Ok(0.0);
    }
    let estimate = f64::from(d_coef) * distance.numerator / denominator;
    if d == d0 {
        distance.d = distance.d.max(estimate);
    }
    distance.largest = distance.largest.max(estimate);
    distance.d = distance.d.max(distance.largest);
    b.prodigy_update(&mut tensors, rate as f32, weight_decay, (distance.d * f64::from(eps)) as f32)?;
    Ok(rate as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_ops::{Backend as _, Reference};

    /// The numbers are those of `prodigyopt` 1.1.2: `Prodigy(params, lr=1, weight_decay=0.01, d0=1e-3,
    /// use_bias_correction=True, safeguard_warmup=True)`.
    #[test]
    fn prodigy_takes_the_steps_of_prodigyopt() {
        let b = Reference::new();
        let upload = |shape: [usize; 2], values: Vec<f32>| {
            b.upload(&HostTensor::from_f32(shape, values).unwrap(), DType::F32).unwrap()
        };
        let start = [([1, 3], vec![0.5, -1.0, 0.25]), ([2, 1], vec![2.0, -0.125])];
        let mut params =
            start.map(|(shape, values)| Param { name: "p", value: upload(shape, values), grad: None });
        let (betas, eps, weight_decay) = ([0.9, 0.999], 1e-8, 0.01);
        let settings = Optimizer::Prodigy { betas, eps, weight_decay, d0: 1e-3, d_coef: 1.0 };
        let named = params.iter().map(|param| (param.name.to_owned(), param));
        let mut optimizer = OptimizerState::new(&b, settings, named).unwrap();
        for step in 1..=20u64 {
            for (param, shift) in params.iter_mut().zip([0.3, -0.7]) {
                let host = b.download(&param.value).unwrap();
                let values = host.to_f32().unwrap();
                let gradient =
                    |(i, value): (usize, &f32)| 0.5 * value + shift * (i as f32 + 0.1 * step as f32).cos();
                let gradient = values.iter().enumerate().map(gradient).collect();
                let dims = host.shape().dims();
                param.grad = Some(upload([dims[0], dims[1]], gradient));
            }
            optimizer.step(&b, params.iter_mut().collect(), 1.0, step, 1.0).unwrap();
        }
        let found: Vec<f32> = params
            .iter()
            .flat_map(|param| b.download(&param.value).unwrap().to_f32().unwrap().into_owned())
            .collect();
        let expected = [0.480_309_46, -0.977_624_65, 0.271_625_46, 1.977_322_3, -0.125_930_46];
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}");
        let Moments::Prodigy(_, distance) = optimizer.moments else { unreachable!("it is Prodigy's") };
        assert!((distance.d - 0.001_593_99).abs() < 1e-7, "{}", distance.d);
    }
}

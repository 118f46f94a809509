//! The trainer: one optimizer step over a list of batches.

use std::collections::HashMap;

use kiln_nn::transformer::training::{Keep, Tape, TrainingItem};
use kiln_nn::transformer::{Position, RopeTables, Transformer};
use kiln_ops::{Tensor as _, TrainingBackend};
use kiln_tensor::{DType, HostTensor};
use kiln_weights::TrainedModule;

use crate::adapter::{AdapterSet, derive, target_layers};
use crate::objective::{NoisyExample, PreparedExample};
use crate::optimizer::OptimizerState;
use crate::state::find;
use crate::{Error, Example, Result, StepReport, Stepper, TrainSettings, TrainerState};

/// Distance on the t axis between the image and its references.
const REFERENCE_STEP: u32 = 10;

/// Which of a step's random numbers a seed is for.
const DROPOUT: u64 = 2;
const HELD_OUT: u64 = 3;

/// Trains the adapters of a frozen transformer.
pub struct Trainer<B: TrainingBackend> {
    b: B,
    transformer: Transformer<B>,
    settings: TrainSettings,
    adapters: AdapterSet<B>,
    optimizer: OptimizerState<B>,
    /// The moving average of every parameter.
    ema: Option<Vec<B::Tensor>>,
    step: u64,
    /// Rotary tables by the sizes of their tokens.
    ropes: HashMap<Vec<usize>, RopeTables<B>>,
}

/// The tensors of one example.
struct Inputs<B: TrainingBackend> {
    text: B::Tensor,
    image: B::Tensor,
    references: Option<B::Tensor>,
    rope: Vec<usize>,
    sigma: f32,
}

impl<B: TrainingBackend> Trainer<B> {
    /// Starts a training. The transformer's activations must have the settings' dtype, and it must have no LoRAs.
    pub fn new(b: &B, transformer: Transformer<B>, settings: TrainSettings) -> Result<Self> {
        check(&transformer, &settings)?;
        let targets = target_layers(transformer.config(), &settings.adapter)?;
        let mut adapters = AdapterSet::new(b, &targets, &settings.adapter, settings.seed)?;
        for (layer, w) in transformer.block_linears() {
            adapters.initialize_magnitudes(b, layer, w)?;
        }
        let optimizer = OptimizerState::new(b, settings.optimizer, adapters.params())?;
        let ema = settings.ema_decay.map(|_| adapters.params().map(|(_, p)| p.value.clone()).collect());
        let b = b.clone();
        Ok(Trainer { b, transformer, settings, adapters, optimizer, ema, step: 0, ropes: HashMap::new() })
    }

    /// Continues a training from its state.
    pub fn restore(
        b: &B,
        transformer: Transformer<B>,
        settings: TrainSettings,
        state: &TrainerState,
    ) -> Result<Self> {
        let mut trainer = Trainer::new(b, transformer, settings)?;
        let names = trainer.names();
        for name in &names {
            let host = find(&state.tensors, &format!("adapter.{name}"))?;
            trainer.adapters.set(b, name, host)?;
        }
        trainer.optimizer.restore(b, &names, state)?;
        if let Some(ema) = &mut trainer.ema {
            for (name, average) in names.iter().zip(ema) {
                *average = b.upload(find(&state.tensors, &format!("ema.{name}"))?, DType::F32)?;
            }
        }
        trainer.step = state.step;
        Ok(trainer)
    }

    /// Everything that [`Trainer::restore`] needs.
    pub fn state(&self) -> Result<TrainerState> {
        let mut state = TrainerState { step: self.step, ..TrainerState::default() };
        for (name, param) in self.adapters.params() {
            state.tensors.insert(format!("adapter.{name}"), self.b.download(&param.value)?);
        }
        let names = self.names();
        for (name, average) in names.iter().zip(self.ema.iter().flatten()) {
            state.tensors.insert(format!("ema.{name}"), self.b.download(average)?);
        }
        self.optimizer.save(&self.b, &names, &mut state)?;
        Ok(state)
    }

    /// The adapter's weights.
    pub fn adapter(&self) -> Result<Vec<TrainedModule>> {
        self.adapters.modules(&self.b, None)
    }

    /// The moving average of the adapter's weights, if there is one.
    pub fn ema_adapter(&self) -> Result<Option<Vec<TrainedModule>>> {
        self.ema.as_ref().map(|ema| self.adapters.modules(&self.b, Some(ema))).transpose()
    }

    /// Replaces the adapter's weights, before the first step: continues from a trained adapter of the same layers and ranks.
    pub fn set_adapter(&mut self, modules: &[TrainedModule]) -> Result<()> {
        for module in modules {
            for (name, host) in &module.tensors {
                self.adapters.set(&self.b, &format!("{}.{name}", module.layer), host)?;
            }
        }
        self.optimizer = OptimizerState::new(&self.b, self.settings.optimizer, self.adapters.params())?;
        if let Some(ema) = &mut self.ema {
            *ema = self.adapters.params().map(|(_, p)| p.value.clone()).collect();
        }
        Ok(())
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The settings.
    pub fn settings(&self) -> &TrainSettings {
        &self.settings
    }

    /// The frozen transformer.
    pub fn transformer(&self) -> &Transformer<B> {
        &self.transformer
    }

    fn names(&self) -> Vec<String> {
        self.adapters.params().map(|(name, _)| name).collect()
    }

    /// One optimizer step over these batches, whose gradients are averaged.
    pub fn step(&mut self, batches: &[&[Example]]) -> Result<StepReport> {
        self.check_examples(batches.iter().flat_map(|batch| batch.iter()))?;
        let prepared = self.settings.prepare(self.step, batches)?;
        self.step_prepared(&prepared)
    }

    /// [`Trainer::step`] with given noise.
    pub fn step_noisy(&mut self, batches: &[&[NoisyExample<'_>]]) -> Result<StepReport> {
        let batch = |batch: &&[NoisyExample<'_>]| batch.iter().map(NoisyExample::prepare).collect();
        self.step_prepared(&batches.iter().map(batch).collect::<Result<Vec<_>>>()?)
    }

    /// [`Trainer::step`] with examples that [`TrainSettings::prepare`] prepared for it.
    pub fn step_prepared(&mut self, batches: &[Vec<PreparedExample>]) -> Result<StepReport> {
        self.check_examples(batches.iter().flatten().map(|prepared| &prepared.example))?;
        let losses = self.accumulate(batches);
        let report = losses.and_then(|losses| self.update(&losses));
        self.adapters.clear_gradients();
        report
    }

    fn check_examples<'a>(&self, mut examples: impl Iterator<Item = &'a Example>) -> Result<()> {
        examples.try_for_each(|example| check_example(example, &self.transformer))
    }

    /// The loss and the gradient of every parameter, by name, without a step.
    pub fn gradients(&mut self, batch: &[NoisyExample<'_>]) -> Result<(f32, Vec<(String, HostTensor)>)> {
        let prepared = batch.iter().map(NoisyExample::prepare).collect::<Result<Vec<_>>>()?;
        let losses = self.accumulate(&[prepared]);
        let gradients = self.adapters.params().map(|(name, param)| match &param.grad {
            Some(grad) => Ok((name, self.b.download(grad)?)),
            None => Ok((name, HostTensor::zeros(param.value.shape().clone()))),
        });
        let gradients = gradients.collect::<Result<Vec<_>>>();
        self.adapters.clear_gradients();
        Ok((self.total(&losses?)?, gradients?))
    }

    /// The loss of a batch at these noise levels, one per example, without dropout and gradients. The noise follows from `seed`.
    pub fn evaluate(&mut self, batch: &[Example], sigmas: &[f32], seed: u64) -> Result<f32> {
        if sigmas.len() != batch.len() {
            let what = format!("{} noise levels for {} examples", sigmas.len(), batch.len());
            return Err(Error::Settings(what));
        }
        let mut prepared = Vec::with_capacity(batch.len());
        for (i, (example, sigma)) in batch.iter().zip(sigmas).enumerate() {
            check_example(example, &self.transformer)?;
            let noisy = NoisyExample::with_sigma(example, *sigma, derive(&[seed, HELD_OUT, i as u64]))?;
            prepared.push(noisy.prepare()?);
        }
        self.adapters.dropout_seed = None;
        let [loss, _] = self.loss(&prepared, Keep::Nothing, 1.0)?.0;
        self.scalar(&loss)
    }

    /// Adds the gradients of all batches; returns their shares of the mean loss. A device may still be computing them.
    fn accumulate(&mut self, batches: &[Vec<PreparedExample>]) -> Result<Vec<B::Tensor>> {
        if batches.is_empty() || batches.iter().any(Vec::is_empty) {
            return Err(Error::Example("a step needs at least one example in every batch".into()));
        }
        self.adapters.clear_gradients();
        let keep = if self.settings.checkpointing { Keep::BlockInputs } else { Keep::Activations };
        let share = 1.0 / batches.len() as f32;
        let mut losses = Vec::with_capacity(batches.len());
        for (i, batch) in batches.iter().enumerate() {
            let seed = derive(&[self.settings.seed, DROPOUT, self.step, i as u64]);
            self.adapters.dropout_seed = Some(seed);
            let ([loss, d_velocity], tape) = self.loss(batch, keep, share)?;
            self.transformer.backward(&self.b, tape, &d_velocity, &mut self.adapters)?;
            losses.push(loss);
        }
        Ok(losses)
    }

    fn total(&self, losses: &[B::Tensor]) -> Result<f32> {
        losses.iter().map(|loss| self.scalar(loss)).sum()
    }

    /// `share` times the mean squared error of a batch, and its gradient with respect to the velocity.
    #[expect(clippy::type_complexity, reason = "a loss, its gradient and the way back")]
    fn loss(
        &mut self,
        batch: &[PreparedExample],
        keep: Keep,
        share: f32,
    ) -> Result<([B::Tensor; 2], Tape<B, AdapterSet<B>>)> {
        let mut targets = Vec::with_capacity(batch.len());
        let mut inputs = Vec::with_capacity(batch.len());
        for prepared in batch {
            targets.push(self.b.upload(&prepared.velocity, DType::F32)?);
            inputs.push(self.inputs(prepared)?);
        }
        let b = &self.b;
        let items: Vec<TrainingItem<'_, B>> = inputs
            .iter()
            .map(|inputs| TrainingItem {
                text: &inputs.text,
                image: &inputs.image,
                references: inputs.references.as_ref(),
                rope: &self.ropes[&inputs.rope],
                timestep: inputs.sigma,
            })
            .collect();
        let guidance = Some(self.settings.guidance);
        let (velocity, tape) =
            self.transformer.forward_training(b, &items, guidance, &self.adapters, keep)?;
        let target = match targets.len() {
            1 => targets.remove(0),
            _ => b.concat_rows(&targets.iter().collect::<Vec<_>>())?,
        };
        let scale = share / velocity.shape().numel() as f32;
        Ok((b.squared_error(&velocity, &target, scale)?, tape))
    }

    fn inputs(&mut self, prepared: &PreparedExample) -> Result<Inputs<B>> {
        let (b, example) = (&self.b, &prepared.example);
        let mut sizes = vec![example.text.shape().rows(), example.height, example.width];
        let mut positions = Position::grid(0, example.height, example.width);
        let mut references = Vec::with_capacity(example.references.len());
        for (i, reference) in example.references.iter().enumerate() {
            let t = REFERENCE_STEP * (i as u32 + 1);
            positions.extend(Position::grid(t, reference.height, reference.width));
            sizes.extend([reference.height, reference.width]);
            references.push(b.upload(&reference.latents, DType::F32)?);
        }
        if !self.ropes.contains_key(&sizes) {
            let text = Position::text(example.text.shape().rows());
            let tables = self.transformer.rope_tables(b, &text, &positions)?;
            self.ropes.insert(sizes.clone(), tables);
        }
        let references = match references.len() {
            0 => None,
            1 => Some(references.remove(0)),
            _ => Some(b.concat_rows(&references.iter().collect::<Vec<_>>())?),
        };
        Ok(Inputs {
            text: b.upload(&example.text, self.transformer.dtype())?,
            image: b.upload(&prepared.noised, DType::F32)?,
            references,
            rope: sizes,
            sigma: prepared.sigma,
        })
    }

    /// Clips the gradient and takes the optimizer's step.
    fn update(&mut self, losses: &[B::Tensor]) -> Result<StepReport> {
        let (b, step) = (&self.b, self.step + 1);
        let gradients: Vec<&B::Tensor> =
            self.adapters.params().filter_map(|(_, p)| p.grad.as_ref()).collect();
        let squares = b.sum_squares(&gradients)?;
        // Read at the end, so that a device computes everything without waiting.
        let (loss, grad_norm) = (self.total(losses)?, self.scalar(&squares)?.sqrt());
        for (what, value) in [("the loss", loss), ("the gradient", grad_norm)] {
            if !value.is_finite() {
                return Err(Error::NotFinite { what, step });
            }
        }
        let grad_scale = match self.settings.max_grad_norm {
            Some(max) => (max / (grad_norm + 1e-6)).min(1.0),
            None => 1.0,
        };
        let lr = self.settings.learning_rate.at(step);
        let params = self.adapters.params_mut().map(|(_, param)| param).collect();
        let learning_rate = self.optimizer.step(b, params, lr, step, grad_scale)?;
        self.adapters.changed();
        if let (Some(ema), Some(decay)) = (&mut self.ema, self.settings.ema_decay) {
            for (average, (_, param)) in ema.iter_mut().zip(self.adapters.params()) {
                *average = b.lerp(average, &param.value, 1.0 - decay)?;
            }
        }
        self.step = step;
        Ok(StepReport { step, loss, grad_norm, learning_rate })
    }

    fn scalar(&self, x: &B::Tensor) -> Result<f32> {
        Ok(self.b.download(x)?.to_f32()?[0])
    }
}

impl<B: TrainingBackend> Stepper for Trainer<B> {
    fn step(&mut self, batches: &[Vec<PreparedExample>]) -> Result<StepReport> {
        self.step_prepared(batches)
    }

    fn steps(&self) -> u64 {
        Trainer::steps(self)
    }

    fn state(&self) -> Result<TrainerState> {
        Trainer::state(self)
    }

    fn adapter(&self) -> Result<Vec<TrainedModule>> {
        match self.ema_adapter()? {
            Some(average) => Ok(average),
            None => Trainer::adapter(self),
        }
    }
}

/// Fails if the settings can't be used with this transformer.
fn check<B: TrainingBackend>(transformer: &Transformer<B>, settings: &TrainSettings) -> Result<()> {
    if transformer.dtype() != settings.dtype() {
        let (found, expected) = (transformer.dtype(), settings.dtype());
        return Err(Error::Settings(format!("the transformer computes in {found}, expected {expected}")));
    }
    let ranges = [
        ("the learning rate", Some(settings.learning_rate.peak), f32::MAX),
        ("the largest gradient norm", settings.max_grad_norm, f32::MAX),
        ("the decay of the moving average", settings.ema_decay, 1.0),
    ];
    for (what, value, largest) in ranges {
        if let Some(value) = value.filter(|v| !(0.0..=largest).contains(v)) {
            let range = if largest == 1.0 { "0 to 1" } else { "a number of at least 0" };
            return Err(Error::Settings(format!("{what} is {value}, expected {range}")));
        }
    }
    settings.sigmas.check()
}

/// Fails if an example does not fit the transformer.
fn check_example<B: TrainingBackend>(example: &Example, transformer: &Transformer<B>) -> Result<()> {
    let config = transformer.config();
    let expect = |what: &str, found: &HostTensor, expected: [usize; 2]| {
        if found.shape().dims() != expected || expected[0] == 0 {
            let (found, [rows, cols]) = (found.shape(), expected);
            return Err(Error::Example(format!("{what} {found}, expected [{rows}, {cols}]")));
        }
        Ok(())
    };
    let channels = config.in_channels;
    expect("the latents have shape", &example.latents, [example.height * example.width, channels])?;
    for reference in &example.references {
        expect("a reference has shape", &reference.latents, [reference.height * reference.width, channels])?;
    }
    let rows = example.text.shape().dims().first().copied().unwrap_or(0);
    expect("the text has shape", &example.text, [rows, config.joint_attention_dim])
}

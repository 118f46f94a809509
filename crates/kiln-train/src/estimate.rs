//! What a training will cost: memory, and how much longer references make a step.

use std::fmt;

use kiln_engine::Model;

use crate::dataset::{Dataset, Entry, ImageSize};
use crate::{Optimizer, Result, TrainSettings, target_layers};

/// An estimate before anything is loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostEstimate {
    /// Trained parameters.
    pub parameters: u64,
    /// Bytes of the transformer's weights.
    pub weights: u64,
    /// Bytes of the adapter, its gradients and the optimizer's state.
    pub adapter: u64,
    /// Bytes of the activations of the largest batch.
    pub activations: u64,
    /// Operations of a step, relative to one without references.
    pub reference_factor: f64,
}

impl CostEstimate {
    /// Estimates a training with batches of `batch` examples.
    pub fn new(
        model: &Model,
        data: &Dataset,
        settings: &TrainSettings,
        batch: usize,
    ) -> Result<CostEstimate> {
        let config = &model.transformer.config;
        let layers = target_layers(config, &settings.adapter)?;
        let parameters: u64 =
            layers.iter().map(|target| (target.rank * (target.layer.rows + target.layer.cols)) as u64).sum();
        let state = match settings.optimizer {
            Optimizer::AdamW { .. } => 8,
            Optimizer::AdamW8bit { .. } => 2,
            Optimizer::Prodigy { .. } => 16,
        };
        let average = if settings.ema_decay.is_some() { 4 } else { 0 };
        let rows = |entry: &Entry| rows(entry, model);
        let most = data.entries.iter().map(|entry| rows(entry).iter().sum::<usize>()).max().unwrap_or(0);
        let blocks = config.num_layers + config.num_single_layers;
        // What the backward pass of a block needs: its input and norm, q, k, v, the attention, twice the MLP.
        let block = config.dim() as f64 * (8.0 + 3.0 * config.mlp_ratio);
        let kept = if settings.checkpointing {
            block + (config.dim() * blocks) as f64
        } else {
            block * blocks as f64
        };
        let activations = (most * batch) as f64 * kept * settings.dtype().size() as f64;
        let (mut with, mut without) = (0.0, 0.0);
        for entry in &data.entries {
            let [own, references] = rows(entry);
            with += config.operations(own + references) * entry.repeats as f64;
            without += config.operations(own) * entry.repeats as f64;
        }
        Ok(CostEstimate {
            parameters,
            weights: model.weight_bytes(settings.base.linear(1)).transformer,
            adapter: parameters * (8 + state + average),
            activations: activations as u64,
            reference_factor: if without > 0.0 { with / without } else { 1.0 },
        })
    }

    /// Bytes of memory in all.
    pub fn memory(&self) -> u64 {
        self.weights + self.adapter + self.activations
    }

    /// Bytes of the state and of `checkpoints` LoRAs in f32.
    pub fn disk(&self, checkpoints: u64) -> u64 {
        // While a state is replaced, there are two.
        2 * (self.adapter - 4 * self.parameters) + checkpoints * 4 * self.parameters
    }
}

/// The tokens of an example's text and image, and of its references.
fn rows(entry: &Entry, model: &Model) -> [usize; 2] {
    let tokens = |size: ImageSize| match size {
        ImageSize::Bucket(size) => model.grid_tokens(size.map(|side| side as usize)),
        ImageSize::Reference(side) => model.grid_tokens([side as usize; 2]),
    };
    let references = entry.references.iter().map(|image| tokens(image.size)).sum();
    [model.default_tokens() + tokens(entry.image.size), references]
}

impl fmt::Display for CostEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes: u64| match bytes as f64 / f64::from(1 << 30) {
            gib if gib < 0.95 => format!("{:.0} MiB", gib * 1024.0),
            gib => format!("{gib:.1} GiB"),
        };
        write!(
            f,
            "{:.1} M parameters; about {} of memory: {} weights, {} activations, {} adapter and optimizer",
            self.parameters as f64 / 1e6,
            size(self.memory()),
            size(self.weights),
            size(self.activations),
            size(self.adapter)
        )?;
        if self.reference_factor > 1.05 {
            write!(f, "; the references make a step {:.1} times as long", self.reference_factor)?;
        }
        Ok(())
    }
}

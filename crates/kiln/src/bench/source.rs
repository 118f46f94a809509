//! The measured model: one from files, or one with synthetic weights.

use std::sync::Arc;

use kiln_engine::{Model, ModelComponent};
use kiln_weights::{Component, WeightSource};

use super::config::ModelConfig;
use crate::args::StoredArg;
use crate::error::CliError;

/// The source of a model's weights.
pub enum ModelSource {
    /// A model's files.
    Files(Arc<Model>),
    /// Random values in the shapes of a published model.
    Synthetic {
        config: Box<ModelConfig>,
        /// Bytes of distinct weights that fit into memory.
        budget: u64,
        stored: StoredArg,
    },
}

impl ModelSource {
    pub fn name(&self) -> String {
        match self {
            ModelSource::Files(model) => format!("{} (`{}`)", model.variant, model.path.display()),
            ModelSource::Synthetic { config, .. } => format!("{} (synthetic weights)", config.name),
        }
    }

    /// Returns the model. Synthetic weights are created anew for each call, when they are first read, so that dropping a
    /// component frees its memory. `components` is how many of them are in memory at once and share the budget.
    pub fn model(&self, components: u64) -> Result<Arc<Model>, CliError> {
        let (config, budget, stored) = match self {
            ModelSource::Files(model) => return Ok(Arc::clone(model)),
            ModelSource::Synthetic { config, budget, stored } => {
                (config, budget / components.max(1), *stored)
            }
        };
        fn component<C>(name: &str, config: C, kind: Component, weights: WeightSource) -> ModelComponent<C> {
            ModelComponent::from_weights(name.into(), config, kind, weights)
        }
        let linear = || match stored {
            StoredArg::Bf16 => WeightSource::synthetic(budget),
            StoredArg::Q4K => WeightSource::synthetic_q4_k(budget),
        };
        let model = Model::from_components(
            config.name,
            config.variant,
            component("transformer", config.transformer.clone(), Component::Transformer, linear()),
            Some(component("text_encoder", config.text_encoder.clone(), Component::TextEncoder, linear())),
            Some(component("vae", config.vae.clone(), Component::Vae, WeightSource::synthetic(budget))),
        );
        Ok(Arc::new(model?))
    }
}

//! The measured model: one from files, or one with synthetic weights.

use std::sync::Arc;

use kiln_engine::{Model, ModelComponent};
use kiln_weights::{Component, WeightSource};

use super::config::ModelConfig;
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
        let (config, budget) = match self {
            ModelSource::Files(model) => return Ok(Arc::clone(model)),
            ModelSource::Synthetic { config, budget } => (config, budget / components.max(1)),
        };
        fn synthetic_component<C>(
            name: &str,
            config: C,
            component: Component,
            budget: u64,
        ) -> ModelComponent<C> {
            ModelComponent::from_weights(name.into(), config, component, WeightSource::synthetic(budget))
        }
        let model = Model::from_components(
            config.name,
            config.variant,
            synthetic_component("transformer", config.transformer.clone(), Component::Transformer, budget),
            config
                .text_encoder
                .clone()
                .map(|c| synthetic_component("text_encoder", c, Component::TextEncoder, budget)),
            Some(synthetic_component("vae", config.vae.clone(), Component::Vae, budget)),
        );
        Ok(Arc::new(model?))
    }
}

//! The model that is measured: one of files, or one whose weights are made up.

use std::sync::Arc;

use kiln_engine::{Model, Part};
use kiln_weights::{Component, WeightSource};

use super::sizes::Sizes;
use crate::failure::Failure;

/// Where the weights come from.
pub enum Source {
    /// Files.
    Model(Arc<Model>),
    /// Nowhere: random values of a model's true size.
    Synthetic {
        sizes: Box<Sizes>,
        /// Bytes of weights that fit into memory beside the work.
        budget: u64,
    },
}

impl Source {
    pub fn name(&self) -> String {
        match self {
            Source::Model(model) => format!("{} (`{}`)", model.variant, model.path.display()),
            Source::Synthetic { sizes, .. } => format!("{} (synthetic weights)", sizes.name),
        }
    }

    /// The model. Made-up weights are made anew every time, as they are asked for, so that a part that is dropped gives its
    /// memory back; `parts` of them have to share it.
    pub fn model(&self, parts: u64) -> Result<Arc<Model>, Failure> {
        let (sizes, budget) = match self {
            Source::Model(model) => return Ok(Arc::clone(model)),
            Source::Synthetic { sizes, budget } => (sizes, budget / parts.max(1)),
        };
        fn made<C>(name: &str, config: C, component: Component, budget: u64) -> Part<C> {
            Part::open(name.into(), config, component, WeightSource::synthetic(budget))
        }
        let model = Model::from_parts(
            sizes.name,
            sizes.variant,
            made("transformer", sizes.transformer.clone(), Component::Transformer, budget),
            sizes.text_encoder.clone().map(|c| made("text_encoder", c, Component::TextEncoder, budget)),
            Some(made("vae", sizes.vae.clone(), Component::Vae, budget)),
        );
        Ok(Arc::new(model?))
    }
}

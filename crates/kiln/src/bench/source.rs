//! Where the weights come from: a folder, or nowhere.

use kiln_model::{ModelFolder, Part, Variant, text_encoder, transformer, vae};
use kiln_weights::WeightSource;

use super::sizes::Sizes;
use crate::failure::Failure;

pub enum Source {
    Folder(Box<ModelFolder>),
    Synthetic {
        sizes: Box<Sizes>,
        /// Bytes of weights that fit into memory beside the work.
        budget: u64,
    },
}

impl Source {
    pub fn name(&self) -> String {
        match self {
            Source::Folder(folder) => format!("{} (`{}`)", folder.variant, folder.path.display()),
            Source::Synthetic { sizes, .. } => format!("{} (synthetic weights)", sizes.name),
        }
    }

    pub fn variant(&self) -> Variant {
        match self {
            Source::Folder(folder) => folder.variant,
            Source::Synthetic { sizes, .. } => sizes.variant,
        }
    }

    pub fn transformer(&self) -> &transformer::Config {
        match self {
            Source::Folder(folder) => &folder.transformer.config,
            Source::Synthetic { sizes, .. } => &sizes.transformer,
        }
    }

    pub fn text_encoder(&self) -> Option<&text_encoder::Config> {
        match self {
            Source::Folder(folder) => folder.text_encoder.as_ref().map(|part| &part.config),
            Source::Synthetic { sizes, .. } => sizes.text_encoder.as_ref(),
        }
    }

    pub fn vae(&self) -> Option<&vae::Config> {
        match self {
            Source::Folder(folder) => folder.vae.as_ref().map(|part| &part.config),
            Source::Synthetic { sizes, .. } => Some(&sizes.vae),
        }
    }

    /// The weights of `text encoder`, `transformer` or `vae`.
    pub fn weights(&self, part: &str) -> Result<WeightSource, Failure> {
        fn open<C>(part: Option<&Part<C>>) -> Option<kiln_model::Result<WeightSource>> {
            part.map(Part::weights)
        }
        match self {
            Source::Synthetic { budget, .. } => Ok(WeightSource::synthetic(*budget)),
            Source::Folder(folder) => {
                let source = match part {
                    "transformer" => Some(folder.transformer.weights()),
                    "text encoder" => open(folder.text_encoder.as_ref()),
                    _ => open(folder.vae.as_ref()),
                };
                Ok(source.ok_or_else(|| Failure::new(format!("the model has no {part}")))??)
            }
        }
    }
}

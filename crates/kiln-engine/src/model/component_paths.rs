//! Paths of the components that a user or a `model.toml` names.

use std::path::PathBuf;

use kiln_family::Variant;

/// Paths of components that replace a model's own, or that together form a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ComponentPaths {
    /// A file or folder with a transformer.
    pub transformer: Option<PathBuf>,
    /// A file or folder with a text encoder.
    pub text_encoder: Option<PathBuf>,
    /// A file or folder with a VAE.
    pub vae: Option<PathBuf>,
    /// A `tokenizer.json`, or a folder with one.
    pub tokenizer: Option<PathBuf>,
    /// The model's variant.
    pub variant: Option<Variant>,
    /// Models in the diffusers layout, and files. A transformer without a text encoder or VAE of its own uses theirs, if
    /// they fit.
    pub fallback_models: Vec<PathBuf>,
    /// Files that are used where several could be meant.
    pub preferred: Vec<PathBuf>,
}

impl ComponentPaths {
    /// Whether no component and no variant is named.
    pub fn is_empty(&self) -> bool {
        self.named_only() == ComponentPaths::default()
    }

    /// Returns these paths without those that were not named by a user.
    pub(super) fn named_only(&self) -> ComponentPaths {
        ComponentPaths { fallback_models: Vec::new(), preferred: Vec::new(), ..self.clone() }
    }

    /// Returns these paths, completed with those of `other`.
    pub(super) fn or(&self, other: ComponentPaths) -> ComponentPaths {
        ComponentPaths {
            transformer: self.transformer.clone().or(other.transformer),
            text_encoder: self.text_encoder.clone().or(other.text_encoder),
            vae: self.vae.clone().or(other.vae),
            tokenizer: self.tokenizer.clone().or(other.tokenizer),
            variant: self.variant.or(other.variant),
            fallback_models: self.fallback_models.clone(),
            preferred: self.preferred.clone(),
        }
    }
}

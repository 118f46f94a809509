//! Parts by name.

use std::path::PathBuf;

use super::variant::Variant;

/// Parts that take the place of a model's own, or make one up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parts {
    /// A file or folder with a transformer.
    pub transformer: Option<PathBuf>,
    /// A file or folder with a text encoder.
    pub text_encoder: Option<PathBuf>,
    /// A file or folder with an autoencoder.
    pub vae: Option<PathBuf>,
    /// A `tokenizer.json`, or a folder with one.
    pub tokenizer: Option<PathBuf>,
    /// What kind of model it is.
    pub variant: Option<Variant>,
    /// Models in diffusers' layout whose text encoder, autoencoder and tokenizer may be taken for a transformer that has none
    /// of its own, if they fit.
    pub others: Vec<PathBuf>,
}

impl Parts {
    /// Whether nothing is named.
    pub fn is_empty(&self) -> bool {
        Parts { others: Vec::new(), ..self.clone() } == Parts::default()
    }

    /// These, and from `other` what is not named here.
    pub(super) fn or(&self, other: Parts) -> Parts {
        Parts {
            transformer: self.transformer.clone().or(other.transformer),
            text_encoder: self.text_encoder.clone().or(other.text_encoder),
            vae: self.vae.clone().or(other.vae),
            tokenizer: self.tokenizer.clone().or(other.tokenizer),
            variant: self.variant.or(other.variant),
            others: self.others.clone(),
        }
    }
}

//! A model: its parts, opened once, and what is known of it without loading them.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use kiln_model::schedule::SchedulerConfig;
use kiln_model::tokenizer::{MAX_TOKENS, PromptTokenizer, TokenizerFiles};
use kiln_model::{text_encoder, transformer, vae};
use kiln_tensor::DType;
use kiln_weights::LinearForm;

use super::part::Part;
use super::parts::Parts;
use super::vae_file::{VaeFile, VaeFiles};
use super::variant::Variant;
use crate::error::{Error, MissingPart, Result};
use crate::lazy::Lazy;
use crate::memory::MemoryNeed;
use crate::placement::WeightBytes;

/// Sides of the images that FLUX.2 is made for.
pub(crate) const FULL_SIZE: usize = 1024;

/// A model whose configuration was read and makes sense. Its weight files are opened once, when they are first needed; what
/// it costs to run is known without loading them.
#[derive(Debug)]
pub struct Model {
    /// The folder, or the file it is packed into.
    pub path: PathBuf,
    /// What kind of model it is.
    pub variant: Variant,
    /// The transformer.
    pub transformer: Part<transformer::Config>,
    /// The text encoder; dev folders may come without.
    pub text_encoder: Option<Part<text_encoder::Config>>,
    /// The autoencoder; some come without.
    pub vae: Option<Part<vae::Config>>,
    /// Its own tokenizer, when there is one.
    pub tokenizer: Option<TokenizerFiles>,
    /// The sampler's configuration, or FLUX.2's own when there is none.
    pub scheduler: SchedulerConfig,
    /// Sides of an image when none are asked for.
    pub default_size: usize,
    /// How it wants to be used, where that differs from its kind.
    pub own: OwnDefaults,
    /// What a packed model says of itself: makers, licence, limits.
    pub card: Option<String>,
    /// Where parts were looked for that are files of their own.
    pub searched: Vec<PathBuf>,
    /// How recipes name it, so that it is found again; its path when absent.
    pub name: Option<String>,
    /// The parts that were named beside it.
    pub parts: Parts,
    pub(super) prompt_tokenizer: Lazy<PromptTokenizer>,
    pub(super) vaes: VaeFiles,
}

/// What a packed model says about its use: values for requests that don't name their own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OwnDefaults {
    /// Steps: `kiln.default_steps` in the metadata.
    pub steps: Option<usize>,
    /// Guidance: `kiln.default_guidance`. Of no effect on models that have none.
    pub guidance: Option<f32>,
}

impl Model {
    /// The length its texts are cut or padded to when none is asked for.
    pub fn default_tokens(&self) -> usize {
        self.tokenizer.as_ref().map_or(MAX_TOKENS, |files| files.config.default_tokens())
    }

    /// Steps when none are asked for: the model's own, else those of its kind.
    pub fn default_steps(&self) -> usize {
        self.own.steps.unwrap_or(self.variant.default_steps())
    }

    /// Guidance when none is asked for: the model's own, else that of its kind; `None` for models that don't use it.
    pub fn default_guidance(&self) -> Option<f32> {
        self.variant.default_guidance().map(|usual| self.own.guidance.unwrap_or(usual))
    }

    /// The sides that a small model, one that has a size of its own, was trained for: from half of that to twice.
    pub fn trained_sides(&self) -> Option<RangeInclusive<usize>> {
        (self.default_size < FULL_SIZE).then_some(self.default_size / 2..=2 * self.default_size)
    }

    /// Its tokenizer, or Qwen3's. Read the first time.
    pub fn prompt_tokenizer(&self) -> Result<&PromptTokenizer> {
        self.prompt_tokenizer.get(|| match &self.tokenizer {
            Some(files) => Ok(PromptTokenizer::open(files)?),
            None => Ok(PromptTokenizer::built_in()?),
        })
    }

    /// Another autoencoder for this model: a file or a folder. Opened the first time.
    pub fn vae_file(&self, path: &std::path::Path) -> Result<Arc<VaeFile>> {
        self.vaes.open(path)
    }

    /// How recipes name it.
    pub fn recorded_name(&self) -> String {
        self.name.clone().unwrap_or_else(|| crate::inputs::absolute(&self.path))
    }

    /// Bytes of its weight files.
    pub fn file_bytes(&self) -> u64 {
        let text = self.text_encoder.as_ref().map_or(0, Part::file_bytes);
        self.transformer.file_bytes() + text + self.vae.as_ref().map_or(0, Part::file_bytes)
    }

    /// What its linear layers take on a device, with the transformer's in `form`.
    pub fn weight_bytes(&self, form: LinearForm) -> WeightBytes {
        // Weights that can't be opened are refused when they are loaded.
        fn stored<C>(part: &Part<C>) -> f64 {
            part.weights().map_or(2.0, |source| source.bytes_per_weight())
        }
        let text = self.text_encoder.as_ref().map(|part| (&part.config, stored(part)));
        WeightBytes::new(text, (&self.transformer.config, stored(&self.transformer)), form)
    }

    /// The memory that an image of `[width, height]` takes beside the weights, with so many text and reference tokens.
    pub fn memory_need(&self, size: [usize; 2], others: usize, dtype: DType) -> MemoryNeed {
        let channels = self.vae.as_ref().map(|vae| vae.config.decoder_channels());
        let channels = channels.map(|levels| [levels[0], levels[1]]);
        MemoryNeed::of(&self.transformer.config, channels, size, others, dtype)
    }

    /// The most tokens that a reference takes.
    pub fn reference_tokens(&self) -> usize {
        match self.trained_sides() {
            Some(_) => (self.default_size / 16).pow(2),
            None => (FULL_SIZE / 16).pow(2),
        }
    }

    /// Why a request that needs this part can't be served.
    pub(crate) fn missing_part(&self, part: MissingPart) -> Error {
        let (path, name) = (self.path.display(), part.name());
        let what = match &self.searched[..] {
            [] => format!("the model `{path}` has no `{name}/config.json`"),
            places => {
                let places: Vec<_> = places.iter().map(|p| format!("`{}`", p.display())).collect();
                format!("there is no {} for `{path}` in {}", name.replace('_', " "), places.join(", "))
            }
        };
        Error::MissingPart { what, part }
    }

    /// Parts of different models are the most common mistake: say so before anything is loaded.
    pub(super) fn check_parts(&self) -> Result<()> {
        let mismatch = |what: String| Err(Error::Mismatch { model: self.path.clone(), what });
        let config = &self.transformer.config;
        if let Some(text) = &self.text_encoder {
            let (expected, found) = (config.joint_attention_dim, text.config.text_dim());
            if expected != found {
                return mismatch(format!(
                    "the transformer takes text {expected} wide (a text encoder of hidden size {}), this text encoder \
                     gives {found} (hidden size {})",
                    expected / text_encoder::STATES.len(),
                    text.config.hidden_size,
                ));
            }
        }
        if let Some(vae) = &self.vae {
            let (expected, found) = (config.in_channels, vae.config.token_channels());
            if expected != found {
                return mismatch(format!(
                    "the transformer works on {expected} latent channels, this VAE makes {found}"
                ));
            }
        }
        if config.guidance_embeds != (self.variant == Variant::Dev) {
            let (has, is) = (config.guidance_embeds, self.variant);
            return mismatch(format!("guidance_embeds is {has}, but the model is said to be {is}"));
        }
        Ok(())
    }
}

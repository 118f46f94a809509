//! Models: what a path refers to, a model's components, and what is known of it before any weight is loaded.
//!
//! ```text
//! path ──locate──▶ folder or packed file ──diffusers──▶ components, perhaps replaced ─┐
//!               └▶ manifest or transformer ──search──▶ other components ──────────────┴─check─▶ Model
//! ```

mod assemble;
mod component;
mod component_paths;
mod diffusers;
mod locate;
mod manifest;
mod missing;
mod search;
mod vae_file;
mod variant;
mod vocabulary;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_family::{TextEncoder, Variant};
use kiln_nn::schedule::SchedulerConfig;
use kiln_nn::tokenizer::{MAX_TOKENS, PromptTokenizer, TokenizerFiles};
use kiln_nn::{text_encoder, transformer, vae};
use kiln_tensor::DType;
use kiln_weights::{Component, LinearPrecision, WeightSource};

pub(crate) use assemble::find_tokenizer;
pub(crate) use component::open_text_encoder;
pub use component::{ComponentFile, ComponentWeights, ModelComponent, config_key};
pub use component_paths::ComponentPaths;
pub use vae_file::VaeFile;
use vae_file::VaeFiles;
pub use variant::{VariantSource, find_variant};
pub use vocabulary::Vocabulary;

use crate::error::{Error, Result};
use crate::memory::MemoryEstimate;
use crate::once::TryOnceLock;
use crate::residency::WeightBytes;

/// A model whose configuration is read and checked. Its weight files are opened once, on first use; the memory it needs
/// is known without loading them.
#[derive(Debug)]
pub struct Model {
    /// The model's folder or file.
    pub path: PathBuf,
    /// Which model of which family it is.
    pub variant: Variant,
    /// How that is known.
    pub variant_source: VariantSource,
    /// The transformer.
    pub transformer: ModelComponent<transformer::Config>,
    /// The text encoder; if absent, prompts are given as embeddings.
    pub text_encoder: Option<ModelComponent<text_encoder::Config>>,
    /// The VAE; if absent, a request must name one.
    pub vae: Option<ModelComponent<vae::Config>>,
    /// The model's own tokenizer; if absent, the text encoder's, which is built in.
    pub tokenizer: Option<TokenizerFiles>,
    /// The scheduler's configuration; FLUX.2's if the model has none.
    pub scheduler: SchedulerConfig,
    /// Default width and height of an image.
    pub default_size: usize,
    /// Defaults that differ from those of its variant.
    pub defaults: ModelDefaults,
    /// The model card of a packed model: authors, licence, limitations.
    pub card: Option<String>,
    /// The words that it has learned, if they are few.
    pub vocabulary: Option<Vocabulary>,
    /// Folders that were searched for components in separate files.
    pub searched_folders: Vec<PathBuf>,
    /// Why files in those folders can't be used.
    pub unusable: BTreeSet<String>,
    /// Components that it lacks because several files could be meant.
    pub ambiguous: Vec<(Component, Vec<PathBuf>)>,
    /// The name that recipes use to find it again; its path if absent.
    pub name: Option<String>,
    /// Components that the user named in place of the model's own.
    pub overrides: ComponentPaths,
    prompt_tokenizer: TryOnceLock<PromptTokenizer>,
    vae_files: VaeFiles,
}

/// Defaults stored in a packed model, for requests that leave these values open.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelDefaults {
    /// Steps: `kiln.default_steps` in the metadata.
    pub steps: Option<usize>,
    /// Guidance: `kiln.default_guidance` in the metadata. Ignored by variants without guidance.
    pub guidance: Option<f32>,
}

impl Model {
    /// Creates a model whose other fields are empty or default.
    fn new(
        path: &Path,
        variant: Variant,
        transformer: ModelComponent<transformer::Config>,
        text_encoder: Option<ModelComponent<text_encoder::Config>>,
        vae: Option<ModelComponent<vae::Config>>,
    ) -> Model {
        Model {
            path: path.to_path_buf(),
            variant,
            variant_source: VariantSource::Stated,
            transformer,
            text_encoder,
            vae,
            tokenizer: None,
            scheduler: SchedulerConfig { dynamic_shift: variant.family.shift, ..Default::default() },
            default_size: variant.family.full_size,
            defaults: ModelDefaults::default(),
            card: None,
            vocabulary: None,
            searched_folders: Vec::new(),
            unusable: BTreeSet::new(),
            ambiguous: Vec::new(),
            name: None,
            overrides: ComponentPaths::default(),
            prompt_tokenizer: TryOnceLock::new(),
            vae_files: VaeFiles::default(),
        }
    }

    /// Changes the variant. The defaults of another one don't apply to it.
    fn set_variant(&mut self, variant: Variant, source: VariantSource) {
        if variant != self.variant {
            self.defaults = ModelDefaults::default();
        }
        (self.variant, self.variant_source) = (variant, source);
    }

    /// Returns the variant with a remark if it is doubtful.
    pub fn described_variant(&self) -> String {
        let remark = self.variant_remark().map(|remark| format!(" ({remark})"));
        format!("{}{}", self.variant, remark.unwrap_or_default())
    }

    /// Returns a remark about a variant that is only a guess, or that the transformer's file contradicts.
    pub fn variant_remark(&self) -> Option<String> {
        if let Some(remark) = self.variant_source.remark() {
            return Some(remark.into());
        }
        let has_guidance = self.transformer.config.guidance_embeds;
        let stated = || find_variant(self.transformer.weights().ok()?, has_guidance).ok();
        match stated() {
            Some((other, VariantSource::Stated))
                if other != self.variant && self.overrides.variant.is_none() =>
            {
                Some(format!("but the transformer's file says {other}"))
            }
            _ => None,
        }
    }

    /// Returns the files that could be a component, if several could.
    pub fn candidates(&self, component: Component) -> Option<&[PathBuf]> {
        let found = self.ambiguous.iter().find(|(ambiguous, _)| *ambiguous == component);
        found.map(|(_, files)| files.as_slice())
    }

    /// Returns one of its components, if it has it.
    pub fn component(&self, component: Component) -> Option<&ComponentWeights> {
        match component {
            Component::Transformer => Some(&self.transformer),
            Component::TextEncoder => self.text_encoder.as_deref(),
            Component::Vae => self.vae.as_deref(),
        }
    }

    /// Returns the components that it has.
    pub fn components(&self) -> impl Iterator<Item = &ComponentWeights> {
        Component::ALL.into_iter().filter_map(|component| self.component(component))
    }

    /// Returns the metadata of a file that one of the model's components is converted to: what its tensors don't tell.
    pub fn metadata_for(&self, component: Component) -> BTreeMap<String, String> {
        let config = self.component(component).and_then(ComponentWeights::config_text);
        let mut metadata = BTreeMap::new();
        metadata.extend(config.map(|text| (config_key(component), text)));
        if component == Component::Transformer {
            metadata.extend(self.variant_source.metadata(self.variant));
            let size = (self.default_size != self.full_size()).then(|| self.default_size.to_string());
            let defaults = [
                ("size", size),
                ("steps", self.defaults.steps.map(|steps| steps.to_string())),
                ("guidance", self.defaults.guidance.map(|guidance| guidance.to_string())),
            ];
            let stored = defaults.into_iter().filter_map(|(name, value)| Some((name, value?)));
            metadata.extend(stored.map(|(name, value)| (format!("kiln.default_{name}"), value)));
        }
        metadata
    }

    /// Returns the default number of tokens that prompts are truncated or padded to.
    pub fn default_tokens(&self) -> usize {
        self.tokenizer.as_ref().map_or(MAX_TOKENS, |files| files.config.default_tokens())
    }

    /// Returns the default number of steps.
    pub fn default_steps(&self) -> usize {
        self.defaults.steps.unwrap_or(self.variant.steps)
    }

    /// Returns the default guidance; `None` for variants without guidance.
    pub fn default_guidance(&self) -> Option<f32> {
        self.variant.default_guidance().map(|usual| self.defaults.guidance.unwrap_or(usual))
    }

    /// Returns the range of image sides that a model smaller than its family's is trained for: half to twice its default.
    pub fn trained_sides(&self) -> Option<RangeInclusive<usize>> {
        (self.default_size < self.full_size()).then_some(self.default_size / 2..=2 * self.default_size)
    }

    /// Returns which text encoder it has, or lacks.
    fn encoder(&self) -> &'static TextEncoder {
        self.text_encoder.as_ref().map_or(self.variant.text_encoder, |component| component.config.encoder())
    }

    /// Returns the model's tokenizer, the one in its text encoder's file, or the built-in one. Reads it on first use.
    pub fn prompt_tokenizer(&self) -> Result<&PromptTokenizer> {
        let encoder = self.encoder();
        // Weights that can't be opened are reported when they are loaded.
        let weights = || self.text_encoder.as_ref().filter(|_| self.tokenizer.is_none())?.weights().ok();
        self.prompt_tokenizer.get_or_try_init(|| open_tokenizer(encoder, self.tokenizer.as_ref(), weights()))
    }

    /// Returns the tokenizer in the files of its text encoder, if there is one and none beside them.
    fn embedded_tokenizer(&self) -> Option<TokenizerFiles> {
        let component = self.text_encoder.as_ref().filter(|_| self.tokenizer.is_none())?;
        embedded_tokenizer(component.config.encoder(), component.weights().ok()?)
    }

    /// Returns another VAE for this model, from a file or folder. Opens it on first use.
    pub fn vae_file(&self, path: &Path) -> Result<Arc<VaeFile>> {
        self.vae_files.open(path)
    }

    /// Whether an autoencoder has the latents that this model works on; `None` if that is not known.
    pub(crate) fn shares_latents(&self, file: &VaeFile) -> Option<bool> {
        let own = self.vae.as_ref()?.weights().ok()?;
        match &file.config {
            Some(_) => vae_file::share_latents(own, &file.weights),
            // TAEF2 is made for FLUX.2's, which small models don't have.
            None => self.trained_sides().map(|_| false),
        }
    }

    /// Returns the error for the first of its tensors that holds NaN or infinity, if there is one. Reads all weights.
    pub fn not_finite(&self) -> Option<Error> {
        let weights = self.components().filter_map(|component| component.weights().ok());
        weights.into_iter().find_map(WeightSource::not_finite).map(Into::into)
    }

    /// Returns the name or absolute path that recipes record.
    pub fn recorded_name(&self) -> String {
        self.name.clone().unwrap_or_else(|| crate::inputs::absolute(&self.path))
    }

    /// Returns what kind of model it is, such as `FLUX.2 klein 4B`: a public name, whatever its files are called.
    pub fn title(&self) -> String {
        let family = self.variant.family;
        let packed = self.name.clone().filter(|_| self.card.is_some());
        packed
            .or_else(|| family.title_of_width(self.transformer.config.dim()))
            .unwrap_or_else(|| family.name.into())
    }

    /// Returns the size of its weight files in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.components().map(ComponentWeights::file_bytes).sum()
    }

    /// Returns notes about tensors in its files that are left out. Components that can't be opened have none.
    pub fn unused_tensor_notes(&self) -> Vec<String> {
        // Components that share a file have the same note.
        let mut notes: Vec<String> = self.components().filter_map(ComponentWeights::note).collect();
        notes.dedup();
        notes
    }

    /// Returns the bytes its linear layers take on a device, with the transformer's in `precision`.
    pub fn weight_bytes(&self, precision: LinearPrecision) -> WeightBytes {
        // Weights that can't be opened are reported when they are loaded.
        fn bytes_per_weight<C>(component: &ModelComponent<C>) -> f64 {
            component.weights().map_or(2.0, |source| source.bytes_per_weight())
        }
        let text_encoder =
            self.text_encoder.as_ref().map(|component| (&component.config, bytes_per_weight(component)));
        let transformer = (&self.transformer.config, bytes_per_weight(&self.transformer));
        WeightBytes::new(text_encoder, transformer, precision)
    }

    /// Estimates the memory that an image of `[width, height]` with this many text and reference tokens takes, without
    /// the weights.
    pub fn memory_estimate(&self, size: [usize; 2], other_tokens: usize, dtype: DType) -> MemoryEstimate {
        let channels = self.vae.as_ref().map(|vae| vae.config.decoder_channels());
        let channels = channels.map(|levels| [levels[0], levels[1]]);
        let tokens = self.grid_tokens(size).saturating_add(other_tokens);
        MemoryEstimate::new(&self.transformer.config, channels, size, tokens, dtype)
    }

    /// Returns the largest number of tokens of one reference image.
    pub fn reference_tokens(&self) -> usize {
        self.grid_tokens([self.default_size.min(self.full_size()); 2])
    }

    /// Returns the pixels along a side of one token. Image sides are multiples of it.
    pub fn pixels_per_token(&self) -> usize {
        self.variant.family.latent.pixels_per_token()
    }

    /// Returns the token grid of an image of this width and height: rows and columns.
    pub fn grid(&self, [width, height]: [usize; 2]) -> [usize; 2] {
        [height, width].map(|side| side / self.pixels_per_token())
    }

    /// Returns the number of tokens of an image of this width and height.
    pub fn grid_tokens(&self, size: [usize; 2]) -> usize {
        let [rows, columns] = self.grid(size);
        rows.saturating_mul(columns)
    }

    /// Returns the width and height of the images that published models of its family are trained for.
    fn full_size(&self) -> usize {
        self.variant.family.full_size
    }

    /// Checks that the components belong together, before anything is loaded: mixing those of different models is the
    /// most common mistake.
    fn check_components(&self) -> Result<()> {
        let mismatch = |what: String| Err(Error::Mismatch { model: self.path.clone(), what });
        let config = &self.transformer.config;
        if let Some(text) = &self.text_encoder {
            let (expected, found) = (self.variant.text_encoder, text.config.encoder());
            if expected != found {
                return mismatch(format!(
                    "the transformer is {} and takes its text from {expected}, this text encoder is {found}",
                    self.variant
                ));
            }
            let (expected, found) = (config.joint_attention_dim, text.config.text_dim());
            if expected != found {
                return mismatch(format!(
                    "the transformer takes text {expected} wide (a text encoder of hidden size {}), this text encoder \
                     gives {found} (hidden size {})",
                    expected / text.config.output_layers().len(),
                    text.config.hidden_size,
                ));
            }
        }
        if let Some(vae) = &self.vae {
            let (expected, found) = (self.variant.family.latent.patch, vae.config.patch());
            if expected != found {
                return mismatch(format!(
                    "{} makes a token of {expected}x{expected} latent pixels, this VAE of {found}x{found}",
                    self.variant.family.name
                ));
            }
            let (expected, found) = (config.in_channels, vae.config.token_channels());
            if expected != found {
                return mismatch(format!(
                    "the transformer works on {expected} latent channels, this VAE makes {found}"
                ));
            }
        }
        if config.guidance_embeds != self.variant.embeds_guidance() {
            let (has, is) = (config.guidance_embeds, self.variant);
            return mismatch(format!("guidance_embeds is {has}, but the model is said to be {is}"));
        }
        Ok(())
    }
}

/// Opens a text encoder's tokenizer: that of the files beside it, the one in its weights, or the built-in one.
pub(crate) fn open_tokenizer(
    encoder: &TextEncoder,
    beside: Option<&TokenizerFiles>,
    weights: Option<&WeightSource>,
) -> Result<PromptTokenizer> {
    let embedded = || embedded_tokenizer(encoder, weights?);
    Ok(match beside {
        Some(files) => PromptTokenizer::open(encoder, files)?,
        None => match embedded() {
            Some(files) => PromptTokenizer::open(encoder, &files)?,
            None => PromptTokenizer::built_in(encoder)?,
        },
    })
}

/// Returns the tokenizer in the weights of a text encoder, if there is one.
fn embedded_tokenizer(encoder: &TextEncoder, weights: &WeightSource) -> Option<TokenizerFiles> {
    TokenizerFiles::embedded(weights).filter(|_| encoder.embeds_tokenizer)
}

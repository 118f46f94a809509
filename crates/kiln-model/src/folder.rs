//! A model as diffusers lays it out: `model_index.json` and a folder for each part.
//!
//! The same layout can be packed into one safetensors file: the tensors of each part are named `part.tensor`, and the
//! configuration files stand in the header's metadata under their relative paths. Models whose parts are files of their own
//! are put together in [`crate::parts`].

use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_weights::{Component, WeightSource};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::parts::{self, Parts};
use crate::schedule::SchedulerConfig;
use crate::tokenizer::{MAX_TOKENS, TokenizerConfig};
use crate::{Error, Result, text_encoder, transformer, vae};

/// Sides of the pictures that FLUX.2 is made for.
pub(crate) const FULL_SIZE: usize = 1024;

/// What kind of FLUX.2 a folder holds. Tensors don't tell; `model_index.json` does, or a file's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Variant {
    /// klein: four steps, no guidance.
    Distilled,
    /// klein base: many steps, classifier-free guidance.
    Base,
    /// klein KV: distilled, references computed once.
    Kv,
    /// dev: guidance is an input of the transformer, text comes as embeddings.
    Dev,
}

impl Variant {
    /// Steps when none are asked for.
    pub fn default_steps(self) -> usize {
        match self {
            Variant::Distilled | Variant::Kv => 4,
            Variant::Base | Variant::Dev => 50,
        }
    }

    /// Guidance when none is asked for; `None` for models that don't use it.
    pub fn default_guidance(self) -> Option<f32> {
        match self {
            Variant::Distilled | Variant::Kv => None,
            Variant::Base | Variant::Dev => Some(4.0),
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::Distilled => "klein (distilled)",
            Variant::Base => "klein base",
            Variant::Kv => "klein KV",
            Variant::Dev => "dev",
        })
    }
}

/// A part of the model: where it is and how it is configured.
#[derive(Clone, Debug)]
pub struct Part<C> {
    /// Its folder or file; in a packed model, the path it would have.
    pub path: PathBuf,
    /// Its `config.json`, or what its tensors tell.
    pub config: C,
    pub(crate) component: Component,
    pub(crate) packed: Option<Packed>,
}

impl<C> Part<C> {
    /// Opens its weights, under the model's names for them.
    pub fn weights(&self) -> Result<WeightSource> {
        let source = match &self.packed {
            None => WeightSource::open(&self.path)?,
            Some(packed) => packed.part(&self.path)?,
        };
        // Weights that can't be recognised are told of tensor by tensor when they are loaded.
        Ok(source.component(self.component)?.unwrap_or(source))
    }
}

/// A whole model in one file.
#[derive(Clone, Debug)]
pub(crate) struct Packed(Arc<WeightSource>);

impl Packed {
    fn part(&self, path: &Path) -> Result<WeightSource> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let missing = || Error::config(self.0.path(), format!("it has no tensors named `{name}.…`"));
        self.0.part(&name).ok_or_else(missing)
    }
}

/// A model whose configuration was read and makes sense; no weights were touched.
#[derive(Clone, Debug)]
pub struct ModelFolder {
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
    /// Sides of a picture when none are asked for.
    pub default_size: usize,
    /// How it wants to be used, where that differs from its kind.
    pub own: OwnDefaults,
    /// What a packed model says of itself: makers, licence, limits.
    pub card: Option<String>,
    /// Where parts were looked for that are files of their own.
    pub searched: Vec<PathBuf>,
}

/// What a packed model says about its use: values for requests that don't name their own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OwnDefaults {
    /// Steps: `kiln.default_steps` in the metadata.
    pub steps: Option<usize>,
    /// Guidance: `kiln.default_guidance`. Of no effect on models that have none.
    pub guidance: Option<f32>,
}

/// A tokenizer's two files, unread.
#[derive(Clone, Debug)]
pub struct TokenizerFiles {
    /// Where `tokenizer.json` is, for messages.
    pub path: PathBuf,
    pub(crate) tokenizer: Vec<u8>,
    pub(crate) config: TokenizerConfig,
}

#[derive(Deserialize)]
struct ModelIndex {
    #[serde(rename = "_class_name")]
    class_name: String,
    is_distilled: Option<bool>,
}

/// Where the files of a model are.
struct Files<'a> {
    root: &'a Path,
    packed: Option<Packed>,
}

impl Files<'_> {
    /// The bytes of a file, or `None` when there is no such file.
    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match &self.packed {
            Some(packed) => Ok(packed.0.metadata().get(name).map(|text| text.as_bytes().to_vec())),
            None => {
                let file = self.root.join(name);
                match std::fs::read(&file) {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(Error::Read { file, source }),
                }
            }
        }
    }

    /// A JSON file as `T`.
    fn json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let parse = |bytes: Vec<u8>| parse(&self.root.join(name), &bytes);
        self.bytes(name)?.map(parse).transpose()
    }

    fn part<C: DeserializeOwned>(
        &self,
        (name, component): (&str, Component),
        problem: impl Fn(&C) -> Option<String>,
    ) -> Result<Option<Part<C>>> {
        let file = format!("{name}/config.json");
        let Some(config) = self.json(&file)? else { return Ok(None) };
        match problem(&config) {
            Some(what) => Err(Error::config(self.root.join(file), what)),
            None => {
                let (path, packed) = (self.root.join(name), self.packed.clone());
                Ok(Some(Part { path, config, component, packed }))
            }
        }
    }

    fn tokenizer(&self) -> Result<Option<TokenizerFiles>> {
        let Some(tokenizer) = self.bytes("tokenizer/tokenizer.json")? else { return Ok(None) };
        let path = self.root.join("tokenizer/tokenizer.json");
        let config = self.json("tokenizer/tokenizer_config.json")?.unwrap_or_default();
        Ok(Some(TokenizerFiles { path, tokenizer, config }))
    }

    fn own_defaults(&self) -> Result<OwnDefaults> {
        const MOST_STEPS: usize = 1000;
        let steps = self.json::<usize>("kiln.default_steps")?.map(|n| n.clamp(1, MOST_STEPS));
        let guidance = self.json::<f32>("kiln.default_guidance")?;
        if let Some(g) = guidance.filter(|g| !(g.is_finite() && *g >= 0.0)) {
            let what = format!("guidance must be a number of at least 0, found {g}");
            return Err(Error::config(self.root.join("kiln.default_guidance"), what));
        }
        Ok(OwnDefaults { steps, guidance })
    }

    fn variant(&self) -> Result<Variant> {
        let Some(index) = self.json::<ModelIndex>("model_index.json")? else {
            let what = "there is no `model_index.json` in it: not a model in diffusers' layout";
            let exists = self.packed.is_some() || self.root.exists();
            return Err(Error::config(self.root, if exists { what } else { "no such folder" }));
        };
        match (index.class_name.as_str(), index.is_distilled) {
            ("Flux2KleinPipeline" | "Flux2KleinInpaintPipeline", Some(true)) => Ok(Variant::Distilled),
            ("Flux2KleinPipeline" | "Flux2KleinInpaintPipeline", _) => Ok(Variant::Base),
            ("Flux2KleinKVPipeline", _) => Ok(Variant::Kv),
            ("Flux2Pipeline", _) => Ok(Variant::Dev),
            (other, _) => {
                let what = format!("the pipeline is `{other}`, expected one of the FLUX.2 family");
                Err(Error::config(self.root.join("model_index.json"), what))
            }
        }
    }
}

impl ModelFolder {
    /// Opens what is at `path`: a folder in diffusers' layout or in the Hugging Face cache's, a model packed into one file,
    /// a set of parts (`model.toml`), or a transformer whose other parts lie beside it.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFolder> {
        parts::open(Some(path.as_ref()), &Parts::default())
    }

    /// [`ModelFolder::open`], with some parts from elsewhere; without a path, all around `parts.transformer`.
    pub fn open_with(path: Option<&Path>, parts: &Parts) -> Result<ModelFolder> {
        parts::open(path, parts)
    }

    /// Reads the configuration of a folder in diffusers' layout.
    pub(crate) fn diffusers(path: &Path) -> Result<ModelFolder> {
        Self::read(Files { root: path, packed: None })
    }

    /// Reads the configuration of a packed model.
    pub fn packed(source: WeightSource) -> Result<ModelFolder> {
        let path = source.path().to_path_buf();
        Self::read(Files { root: &path, packed: Some(Packed(Arc::new(source))) })
    }

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

    fn read(files: Files<'_>) -> Result<ModelFolder> {
        let variant = files.variant()?;
        let missing = || Error::config(files.root, "there is no `transformer` with a `config.json` in it");
        let transformer: Part<transformer::Config> = files
            .part(("transformer", Component::Transformer), transformer::Config::problem)?
            .ok_or_else(missing)?;
        let text_encoder = match variant {
            Variant::Dev => None,
            _ => files.part(("text_encoder", Component::TextEncoder), text_encoder::Config::problem)?,
        };
        const SCHEDULER: &str = "scheduler/scheduler_config.json";
        let scheduler: SchedulerConfig = files.json(SCHEDULER)?.unwrap_or_default();
        if let Some(what) = scheduler.unsupported() {
            return Err(Error::config(files.root.join(SCHEDULER), what));
        }
        let folder = ModelFolder {
            path: files.root.to_path_buf(),
            variant,
            transformer,
            text_encoder,
            vae: files.part(("vae", Component::Vae), vae::Config::problem)?,
            tokenizer: files.tokenizer()?,
            scheduler,
            default_size: files.json::<usize>("kiln.default_size")?.unwrap_or(FULL_SIZE).clamp(16, 4096),
            own: files.own_defaults()?,
            card: files.packed.as_ref().and_then(|packed| packed.0.metadata().get("model_card").cloned()),
            searched: Vec::new(),
        };
        folder.check_parts()?;
        Ok(folder)
    }

    /// Parts of different models are the most common mistake: say so before anything is loaded.
    pub(crate) fn check_parts(&self) -> Result<()> {
        let mismatch = |what: String| Err(Error::Mismatch { folder: self.path.clone(), what });
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

/// A JSON file as `T`, with an error that names the file, line and field.
pub(crate) fn read<T: DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read(file).map_err(|source| Error::Read { file: file.to_path_buf(), source })?;
    parse(file, &text)
}

fn parse<T: DeserializeOwned>(file: &Path, text: &[u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|e| Error::config(file, e.to_string()))
}

/// A problem with sizes of a model: a width that is 0, or a width or number of layers that no machine could hold.
pub(crate) fn absurd(widths: &[(&str, usize)], layers: &[(&str, usize)]) -> Option<String> {
    const WIDEST: usize = 1 << 20;
    const MOST_LAYERS: usize = 1 << 12;
    if let Some((name, _)) = widths.iter().find(|(_, n)| *n == 0) {
        return Some(format!("{name} is 0"));
    }
    let widths = widths.iter().map(|(name, n)| (name, *n, WIDEST));
    let mut all = widths.chain(layers.iter().map(|(name, n)| (name, *n, MOST_LAYERS)));
    all.find(|(_, n, most)| n > most)
        .map(|(name, n, most)| format!("{name} is {n}, at most {most} make sense"))
}

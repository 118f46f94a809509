//! A model as diffusers lays it out: `model_index.json` and a folder for each part.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::schedule::SchedulerConfig;
use crate::{Error, Result, text_encoder, transformer, vae};

/// What kind of FLUX.2 a folder holds. Tensors don't tell; `model_index.json` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Its folder.
    pub path: PathBuf,
    /// Its `config.json`.
    pub config: C,
}

/// A model folder whose configuration was read and makes sense; no weights were touched.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    /// The folder.
    pub path: PathBuf,
    /// What kind of model it is.
    pub variant: Variant,
    /// The transformer.
    pub transformer: Part<transformer::Config>,
    /// The text encoder; dev folders may come without.
    pub text_encoder: Option<Part<text_encoder::Config>>,
    /// The autoencoder; some come without.
    pub vae: Option<Part<vae::Config>>,
    /// The folder with `tokenizer.json`, when there is one.
    pub tokenizer: Option<PathBuf>,
    /// The sampler's configuration, or FLUX.2's own when there is none.
    pub scheduler: SchedulerConfig,
}

#[derive(Deserialize)]
struct ModelIndex {
    #[serde(rename = "_class_name")]
    class_name: String,
    is_distilled: Option<bool>,
}

impl ModelFolder {
    /// Reads the configuration of the folder at `path`.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFolder> {
        let path = path.as_ref().to_path_buf();
        let variant = variant(&path)?;
        let transformer: Part<transformer::Config> =
            part(&path, "transformer", transformer::Config::problem)?.ok_or_else(|| {
                Error::config(&path, "there is no `transformer` folder with a `config.json`")
            })?;
        let text_encoder = match variant {
            Variant::Dev => None,
            _ => part(&path, "text_encoder", text_encoder::Config::problem)?,
        };
        let scheduler_file = path.join("scheduler").join("scheduler_config.json");
        let scheduler: SchedulerConfig =
            if scheduler_file.is_file() { read(&scheduler_file)? } else { SchedulerConfig::default() };
        if let Some(what) = scheduler.unsupported() {
            return Err(Error::config(scheduler_file, what));
        }
        let folder = ModelFolder {
            vae: part(&path, "vae", vae::Config::problem)?,
            tokenizer: Some(path.join("tokenizer")).filter(|t| t.join("tokenizer.json").is_file()),
            path,
            variant,
            transformer,
            text_encoder,
            scheduler,
        };
        folder.check_parts()?;
        Ok(folder)
    }

    /// Parts of different models are the most common mistake: say so before anything is loaded.
    fn check_parts(&self) -> Result<()> {
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
            return mismatch(format!(
                "guidance_embeds is {has}, but model_index.json says the model is {is}"
            ));
        }
        Ok(())
    }
}

fn variant(path: &Path) -> Result<Variant> {
    let file = path.join("model_index.json");
    if !file.is_file() {
        let what = "there is no `model_index.json` in it: not a model folder in diffusers' layout";
        return Err(Error::config(path, if path.exists() { what } else { "no such folder" }));
    }
    let index: ModelIndex = read(&file)?;
    match (index.class_name.as_str(), index.is_distilled) {
        ("Flux2KleinPipeline" | "Flux2KleinInpaintPipeline", Some(true)) => Ok(Variant::Distilled),
        ("Flux2KleinPipeline" | "Flux2KleinInpaintPipeline", _) => Ok(Variant::Base),
        ("Flux2KleinKVPipeline", _) => Ok(Variant::Kv),
        ("Flux2Pipeline", _) => Ok(Variant::Dev),
        (other, _) => {
            Err(Error::config(file, format!("the pipeline is `{other}`, expected one of the FLUX.2 family")))
        }
    }
}

fn part<C: DeserializeOwned>(
    root: &Path,
    name: &str,
    problem: impl Fn(&C) -> Option<String>,
) -> Result<Option<Part<C>>> {
    let path = root.join(name);
    let file = path.join("config.json");
    if !file.is_file() {
        return Ok(None);
    }
    let config: C = read(&file)?;
    match problem(&config) {
        Some(what) => Err(Error::config(file, what)),
        None => Ok(Some(Part { path, config })),
    }
}

/// A JSON file as `T`, with an error that names the file, line and field.
pub(crate) fn read<T: DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read(file).map_err(|source| Error::Read { file: file.to_path_buf(), source })?;
    serde_json::from_slice(&text).map_err(|e| Error::config(file, e.to_string()))
}

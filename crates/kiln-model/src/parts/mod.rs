//! A model put together from files: a transformer, and what belongs to it, named or found beside it.
//!
//! Sizes come from the tensors. What they can't tell, whether a model is distilled, is said by whoever asks, by a
//! `model.toml`, or by the file's name.

mod beside;
mod locate;
mod set;

use std::path::{Path, PathBuf};

use kiln_weights::{Component, WeightSource};

use crate::folder::{self, FULL_SIZE, OwnDefaults, TokenizerFiles};
use crate::schedule::SchedulerConfig;
use crate::{Error, ModelFolder, Part, Result, Variant, text_encoder, transformer, vae};
use beside::Search;
use locate::Located;

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
    /// What the text of a `model.toml` in `folder` names; an error is what is wrong with it.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// let set = "transformer = 'flux-2-klein-4b.gguf'\nvae = 'vae/ae.safetensors'";
    /// let parts = kiln_model::Parts::parse(set, Path::new("models"))?;
    /// assert_eq!(parts.vae.as_deref(), Some(Path::new("models/vae/ae.safetensors")));
    /// assert!(kiln_model::Parts::parse("transformer = '/etc/passwd'", Path::new("models")).is_err());
    /// # Ok::<(), String>(())
    /// ```
    pub fn parse(text: &str, folder: &Path) -> Result<Parts, String> {
        set::parse(text, folder)
    }

    /// Whether nothing is named.
    pub fn is_empty(&self) -> bool {
        Parts { others: Vec::new(), ..self.clone() } == Parts::default()
    }

    /// These, and from `other` what is not named here.
    fn or(&self, other: Parts) -> Parts {
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

pub(crate) fn open(path: Option<&Path>, parts: &Parts) -> Result<ModelFolder> {
    let located = match (path, &parts.transformer) {
        (Some(path), _) => locate::locate(path)?,
        (None, Some(transformer)) => Located::Transformer(transformer.clone()),
        (None, None) => return Err(Error::request("no model and no transformer was named")),
    };
    match located {
        Located::Folder(folder) => replace(ModelFolder::diffusers(&folder)?, parts),
        Located::Packed(source) => replace(ModelFolder::packed(*source)?, parts),
        Located::Set(file, set) => assemble(&file, parts.or(set)),
        Located::Transformer(file) => {
            let set = Parts { transformer: Some(file.clone()), ..Parts::default() };
            assemble(&file, parts.or(set))
        }
    }
}

/// The model with these parts instead of its own.
fn replace(mut model: ModelFolder, parts: &Parts) -> Result<ModelFolder> {
    if parts.is_empty() {
        return Ok(model);
    }
    if let Some(path) = &parts.transformer {
        model.transformer = transformer_part(path)?;
    }
    if let Some(path) = &parts.text_encoder {
        model.text_encoder = Some(text_encoder_part(path)?);
    }
    if let Some(path) = &parts.vae {
        model.vae = Some(vae_part(path)?);
    }
    if let Some(path) = &parts.tokenizer {
        model.tokenizer = Some(tokenizer(path)?);
    }
    if let Some(variant) = parts.variant.filter(|variant| *variant != model.variant) {
        // What it says of itself was said of the other kind.
        (model.variant, model.own) = (variant, OwnDefaults::default());
    }
    model.check_parts()?;
    Ok(model)
}

/// A model around a transformer; `path` stands for it in messages.
fn assemble(path: &Path, parts: Parts) -> Result<ModelFolder> {
    let Some(file) = &parts.transformer else {
        return Err(Error::config(path, "it names no `transformer`"));
    };
    let transformer = transformer_part(file)?;
    let config = &transformer.config;
    let variant = match (parts.variant, config.guidance_embeds) {
        (Some(variant), _) => variant,
        (None, true) => Variant::Dev,
        (None, false) => Variant::by_name(file),
    };
    let mut search = Search::new(file);
    let text_encoder = match &parts.text_encoder {
        _ if variant == Variant::Dev => None,
        Some(named) => Some(text_encoder_part(named)?),
        None => {
            let fits = |source: &WeightSource| {
                let config = text_encoder::Config::from_tensors(source);
                config.is_some_and(|c| c.text_dim() == transformer.config.joint_attention_dim)
            };
            let found = search.find(Component::TextEncoder, "--text-encoder", &fits)?;
            let found = found.map(|file| text_encoder_part(&file)).transpose()?;
            let width = transformer.config.joint_attention_dim;
            let other = || {
                let parts = search.elsewhere(&parts.others, "text_encoder");
                parts.filter_map(|path| text_encoder_part(&path).ok()).find(|p| p.config.text_dim() == width)
            };
            found.or_else(other)
        }
    };
    let vae = match &parts.vae {
        Some(named) => Some(vae_part(named)?),
        None => {
            let fits = |source: &WeightSource| {
                let config = vae::Config::from_tensors(source);
                config.is_some_and(|c| c.token_channels() == transformer.config.in_channels)
            };
            let found = search.find(Component::Vae, "--vae", &fits)?;
            let found = found.map(|file| vae_part(&file)).transpose()?;
            let channels = transformer.config.in_channels;
            let other = || {
                let parts = search.elsewhere(&parts.others, "vae");
                parts.filter_map(|path| vae_part(&path).ok()).find(|p| p.config.token_channels() == channels)
            };
            found.or_else(other)
        }
    };
    let tokenizer = match &parts.tokenizer {
        Some(named) => Some(tokenizer(named)?),
        None => {
            let near = text_encoder.iter().map(|part| part.path.as_path()).chain([file.as_path()]);
            near.filter_map(beside::tokenizer).next().map(|file| self::tokenizer(&file)).transpose()?
        }
    };
    let model = ModelFolder {
        path: path.to_path_buf(),
        variant,
        transformer,
        text_encoder,
        vae,
        tokenizer,
        scheduler: SchedulerConfig::default(),
        default_size: FULL_SIZE,
        own: OwnDefaults::default(),
        card: None,
        searched: search.places,
    };
    model.check_parts()?;
    check_tokenizer(&model)?;
    Ok(model)
}

/// Kiln has the tokenizer of the published text encoders; any other needs its own.
fn check_tokenizer(model: &ModelFolder) -> Result<()> {
    /// One more than the highest id of Qwen3's tokenizer.
    const IDS: usize = 151_669;
    match &model.text_encoder {
        Some(part) if model.tokenizer.is_none() && part.config.vocab_size < IDS => Err(Error::config(
            &part.path,
            format!(
                "this text encoder knows {} tokens, fewer than Qwen3's tokenizer has, and there is no `tokenizer.json` of \
                 its own beside it",
                part.config.vocab_size
            ),
        )),
        _ => Ok(()),
    }
}

fn transformer_part(path: &Path) -> Result<Part<transformer::Config>> {
    part(path, Component::Transformer, transformer::Config::from_tensors, transformer::Config::problem)
}

fn text_encoder_part(path: &Path) -> Result<Part<text_encoder::Config>> {
    part(path, Component::TextEncoder, text_encoder::Config::from_tensors, text_encoder::Config::problem)
}

fn vae_part(path: &Path) -> Result<Part<vae::Config>> {
    part(path, Component::Vae, vae::Config::from_tensors, vae::Config::problem)
}

/// A file, or a folder with perhaps a `config.json`.
fn part<C: serde::de::DeserializeOwned>(
    path: &Path,
    component: Component,
    from_tensors: impl Fn(&WeightSource) -> Option<C>,
    problem: impl Fn(&C) -> Option<String>,
) -> Result<Part<C>> {
    let source = WeightSource::open_component(path, component)?;
    let config_file = path.join("config.json");
    let config = match config_file.is_file() {
        true => folder::read(&config_file)?,
        false => from_tensors(&source).ok_or_else(|| {
            Error::config(path, format!("tensors that every FLUX.2 {component} has are missing"))
        })?,
    };
    match problem(&config) {
        Some(what) => Err(Error::config(path, what)),
        None => Ok(Part { path: path.to_path_buf(), config, component, packed: None }),
    }
}

/// A `tokenizer.json`, or a folder with one, and its settings if they lie beside it.
fn tokenizer(path: &Path) -> Result<TokenizerFiles> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
    let bytes = std::fs::read(&file).map_err(|source| Error::Read { file: file.clone(), source })?;
    let settings = file.with_file_name("tokenizer_config.json");
    let config = if settings.is_file() { folder::read(&settings)? } else { Default::default() };
    Ok(TokenizerFiles { path: file, tokenizer: bytes, config })
}

impl Variant {
    /// What a file's name says of it: `flux-2-klein-base-9b-fp8.safetensors`, `flux-2-klein-9b-kv.gguf`. Names that say
    /// nothing of a model leave it to the folders around.
    pub fn by_name(file: &Path) -> Variant {
        const DEPTH: usize = 4;
        let names = file.iter().rev().take(DEPTH).map(|name| name.to_string_lossy().to_lowercase());
        for name in names {
            let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).collect();
            if words.contains(&"kv") {
                return Variant::Kv;
            }
            if words.contains(&"base") {
                return Variant::Base;
            }
            if words.contains(&"klein") {
                return Variant::Distilled;
            }
        }
        Variant::Distilled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_says_what_it_is() {
        for (name, expected) in [
            ("flux-2-klein-4b.safetensors", Variant::Distilled),
            ("models/FLUX.2-klein-base-9B-Q4_K_M.gguf", Variant::Base),
            ("flux-2-klein-9b-kv-fp8.safetensors", Variant::Kv),
            ("models--bfl--FLUX.2-klein-base-4B/snapshots/0a/model.safetensors", Variant::Base),
            ("/data/base/flux-2-klein-4b.gguf", Variant::Distilled),
            ("/data/x.gguf", Variant::Distilled),
        ] {
            assert_eq!(Variant::by_name(Path::new(name)), expected, "{name}");
        }
    }
}

//! Opens models: finds out what lies at a path, and puts a model together from files, named or found beside it.
//!
//! Sizes come from the tensors. What they can't tell, whether a model is distilled, is said by whoever asks, by a
//! `model.toml`, or by the file's name.

use std::path::Path;
use std::sync::Arc;

use kiln_model::config;
use kiln_model::schedule::SchedulerConfig;
use kiln_model::tokenizer::TokenizerFiles;
use kiln_model::{text_encoder, transformer, vae};
use kiln_weights::{Component, WeightSource};

use super::beside::{self, Search};
use super::diffusers;
use super::locate::{self, Located};
use super::opened::{FULL_SIZE, Model, OwnDefaults};
use super::part::{Opened, Part};
use super::parts::Parts;
use super::variant::Variant;
use crate::error::{Error, Result};
use crate::lazy::Lazy;

impl Model {
    /// Opens what is at `path`: a folder in diffusers' layout or in the Hugging Face cache's, a model packed into one file,
    /// a set of parts (`model.toml`), or a transformer whose other parts lie beside it.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        open(Some(path.as_ref()), &Parts::default())
    }

    /// [`Model::open`], with some parts from elsewhere; without a path, all around `parts.transformer`.
    pub fn open_with(path: Option<&Path>, parts: &Parts) -> Result<Model> {
        open(path, parts)
    }

    /// A model packed into one file that is open.
    pub fn packed(source: WeightSource) -> Result<Model> {
        diffusers::packed(Arc::new(source))
    }

    /// A model of these parts, which don't come from files: to be measured.
    pub fn from_parts(
        name: &str,
        variant: Variant,
        transformer: Part<transformer::Config>,
        text_encoder: Option<Part<text_encoder::Config>>,
        vae: Option<Part<vae::Config>>,
    ) -> Result<Model> {
        let model = bare(Path::new(name), variant, transformer, text_encoder, vae);
        model.check_parts()?;
        Ok(model)
    }
}

fn bare(
    path: &Path,
    variant: Variant,
    transformer: Part<transformer::Config>,
    text_encoder: Option<Part<text_encoder::Config>>,
    vae: Option<Part<vae::Config>>,
) -> Model {
    Model {
        path: path.to_path_buf(),
        variant,
        transformer,
        text_encoder,
        vae,
        tokenizer: None,
        scheduler: SchedulerConfig::default(),
        default_size: FULL_SIZE,
        own: OwnDefaults::default(),
        card: None,
        searched: Vec::new(),
        name: None,
        parts: Parts::default(),
        prompt_tokenizer: Lazy::new(),
        vaes: Default::default(),
    }
}

fn open(path: Option<&Path>, parts: &Parts) -> Result<Model> {
    let opened = &Opened::default();
    let located = match (path, &parts.transformer) {
        (Some(path), _) => locate::locate(path, opened)?,
        (None, Some(transformer)) => Located::Transformer(transformer.clone()),
        (None, None) => return Err(Error::request("no model and no transformer was named")),
    };
    let model = match located {
        Located::Folder(folder) => replace(diffusers::folder(&folder)?, parts, opened),
        Located::Packed(source) => replace(diffusers::packed(source)?, parts, opened),
        Located::Set(file, set) => assemble(&file, &parts.or(set), opened),
        Located::Transformer(file) => {
            let set = Parts { transformer: Some(file.clone()), ..Parts::default() };
            assemble(&file, &parts.or(set), opened)
        }
    };
    Ok(Model { parts: Parts { others: Vec::new(), ..parts.clone() }, ..model? })
}

/// The model with these parts instead of its own.
fn replace(mut model: Model, parts: &Parts, opened: &Opened) -> Result<Model> {
    if parts.is_empty() {
        return Ok(model);
    }
    if let Some(path) = &parts.transformer {
        model.transformer = transformer_part(path, opened)?;
    }
    if let Some(path) = &parts.text_encoder {
        model.text_encoder = Some(text_encoder_part(path, opened)?);
    }
    if let Some(path) = &parts.vae {
        model.vae = Some(vae_part(path, opened)?);
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
fn assemble(path: &Path, parts: &Parts, opened: &Opened) -> Result<Model> {
    let Some(file) = &parts.transformer else {
        return Err(Error::config(path, "it names no `transformer`"));
    };
    let transformer = transformer_part(file, opened)?;
    let config = &transformer.config;
    let variant = match (parts.variant, config.guidance_embeds) {
        (Some(variant), _) => variant,
        (None, true) => Variant::Dev,
        (None, false) => Variant::by_name(file),
    };
    let mut search = Search::new(file, opened);
    let text_encoder = match &parts.text_encoder {
        _ if variant == Variant::Dev => None,
        Some(named) => Some(text_encoder_part(named, opened)?),
        None => {
            let fits = |source: &WeightSource| {
                let config = text_encoder::Config::from_tensors(source);
                config.is_some_and(|c| c.text_dim() == transformer.config.joint_attention_dim)
            };
            let found = search.find(Component::TextEncoder, "--text-encoder", &fits)?;
            let found = found.map(|file| text_encoder_part(&file, opened)).transpose()?;
            let width = transformer.config.joint_attention_dim;
            let other = || {
                let parts = search.elsewhere(&parts.others, "text_encoder");
                parts
                    .filter_map(|path| text_encoder_part(&path, opened).ok())
                    .find(|p| p.config.text_dim() == width)
            };
            found.or_else(other)
        }
    };
    let vae = match &parts.vae {
        Some(named) => Some(vae_part(named, opened)?),
        None => {
            let fits = |source: &WeightSource| {
                let config = vae::Config::from_tensors(source);
                config.is_some_and(|c| c.token_channels() == transformer.config.in_channels)
            };
            let found = search.find(Component::Vae, "--vae", &fits)?;
            let found = found.map(|file| vae_part(&file, opened)).transpose()?;
            let channels = transformer.config.in_channels;
            let other = || {
                let parts = search.elsewhere(&parts.others, "vae");
                parts
                    .filter_map(|path| vae_part(&path, opened).ok())
                    .find(|p| p.config.token_channels() == channels)
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
    let model =
        Model { tokenizer, searched: search.places, ..bare(path, variant, transformer, text_encoder, vae) };
    model.check_parts()?;
    check_tokenizer(&model)?;
    Ok(model)
}

/// Kiln has the tokenizer of the published text encoders; any other needs its own.
fn check_tokenizer(model: &Model) -> Result<()> {
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

fn transformer_part(path: &Path, opened: &Opened) -> Result<Part<transformer::Config>> {
    part(
        path,
        opened,
        Component::Transformer,
        transformer::Config::from_tensors,
        transformer::Config::problem,
    )
}

fn text_encoder_part(path: &Path, opened: &Opened) -> Result<Part<text_encoder::Config>> {
    part(
        path,
        opened,
        Component::TextEncoder,
        text_encoder::Config::from_tensors,
        text_encoder::Config::problem,
    )
}

fn vae_part(path: &Path, opened: &Opened) -> Result<Part<vae::Config>> {
    part(path, opened, Component::Vae, vae::Config::from_tensors, vae::Config::problem)
}

/// A file, or a folder with perhaps a `config.json`.
fn part<C: serde::de::DeserializeOwned>(
    path: &Path,
    opened: &Opened,
    component: Component,
    from_tensors: impl Fn(&WeightSource) -> Option<C>,
    problem: impl Fn(&C) -> Option<String>,
) -> Result<Part<C>> {
    let source = opened.expect(path, component)?;
    let config_file = path.join("config.json");
    let config = match config_file.is_file() {
        true => config::read(&config_file)?,
        false => from_tensors(&source).ok_or_else(|| {
            Error::config(path, format!("tensors that every FLUX.2 {component} has are missing"))
        })?,
    };
    match problem(&config) {
        Some(what) => Err(Error::config(path, what)),
        None => Ok(Part::open(path.to_path_buf(), config, component, source)),
    }
}

/// A `tokenizer.json`, or a folder with one, and its settings if they lie beside it.
fn tokenizer(path: &Path) -> Result<TokenizerFiles> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
    let bytes =
        std::fs::read(&file).map_err(|source| kiln_model::Error::Read { file: file.clone(), source })?;
    let settings = file.with_file_name("tokenizer_config.json");
    let config = if settings.is_file() { config::read(&settings)? } else { Default::default() };
    Ok(TokenizerFiles { path: file, tokenizer: bytes, config })
}

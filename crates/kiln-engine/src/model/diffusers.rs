//! A model as diffusers lays it out: `model_index.json` and a folder for each part.
//!
//! The same layout can be packed into one safetensors file: the tensors of each part are named `part.tensor`, and the
//! configuration files stand in the header's metadata under their relative paths.

use std::path::Path;
use std::sync::Arc;

use kiln_model::config::parse;
use kiln_model::schedule::SchedulerConfig;
use kiln_model::tokenizer::TokenizerFiles;
use kiln_model::{text_encoder, transformer, vae};
use kiln_weights::{Component, WeightSource};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::opened::{FULL_SIZE, Model, OwnDefaults};
use super::part::Part;
use super::parts::Parts;
use super::variant::Variant;
use crate::error::{Error, Result};
use crate::lazy::Lazy;

#[derive(Deserialize)]
struct ModelIndex {
    #[serde(rename = "_class_name")]
    class_name: String,
    is_distilled: Option<bool>,
}

/// Where the files of a model are.
struct Files<'a> {
    root: &'a Path,
    packed: Option<Arc<WeightSource>>,
}

impl Files<'_> {
    /// The bytes of a file, or `None` when there is no such file.
    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match &self.packed {
            Some(packed) => Ok(packed.metadata().get(name).map(|text| text.as_bytes().to_vec())),
            None => {
                let file = self.root.join(name);
                match std::fs::read(&file) {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(kiln_model::Error::Read { file, source }.into()),
                }
            }
        }
    }

    /// A JSON file as `T`.
    fn json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let parse = |bytes: Vec<u8>| Ok(parse(&self.root.join(name), &bytes)?);
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
                let path = self.root.join(name);
                Ok(Some(match &self.packed {
                    Some(file) => Part::packed(file, path, config, component),
                    None => Part::at(path, config, component),
                }))
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

/// Reads the configuration of a folder.
pub(super) fn folder(path: &Path) -> Result<Model> {
    read(&Files { root: path, packed: None })
}

/// Reads the configuration of a packed model.
pub(super) fn packed(source: Arc<WeightSource>) -> Result<Model> {
    let path = source.path().to_path_buf();
    read(&Files { root: &path, packed: Some(source) })
}

fn read(files: &Files<'_>) -> Result<Model> {
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
    let model = Model {
        path: files.root.to_path_buf(),
        variant,
        transformer,
        text_encoder,
        vae: files.part(("vae", Component::Vae), vae::Config::problem)?,
        tokenizer: files.tokenizer()?,
        scheduler,
        default_size: files.json::<usize>("kiln.default_size")?.unwrap_or(FULL_SIZE).clamp(16, 4096),
        own: files.own_defaults()?,
        card: files.packed.as_ref().and_then(|packed| packed.metadata().get("model_card").cloned()),
        searched: Vec::new(),
        name: None,
        parts: Parts::default(),
        prompt_tokenizer: Lazy::new(),
        vaes: Default::default(),
    };
    model.check_parts()?;
    Ok(model)
}

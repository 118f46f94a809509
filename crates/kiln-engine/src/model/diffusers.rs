//! Models in the diffusers layout: `model_index.json` and a folder for each component.
//!
//! The same layout can be packed into one safetensors file: tensors are named `component.tensor`, and the configuration
//! files are stored in the header's metadata under their relative paths.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use kiln_family::{Family, Variant, published_names};
use kiln_nn::config::{parse, read_bytes};
use kiln_nn::schedule::{SCHEDULER, SchedulerConfig};
use kiln_nn::tokenizer::{TokenizerConfig, TokenizerData, TokenizerFiles};
use kiln_nn::transformer;
use kiln_weights::WeightSource;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::component::{ComponentConfig, ModelComponent};
use super::{Model, ModelDefaults};
use crate::error::{Error, Result};

#[derive(Deserialize)]
struct ModelIndex {
    #[serde(rename = "_class_name")]
    class_name: String,
    is_distilled: Option<bool>,
    /// The library and the class of the scheduler.
    #[serde(default)]
    scheduler: Value,
}

/// The files of a model, in a folder or packed into one file.
struct ModelFiles<'a> {
    root: &'a Path,
    packed: Option<Arc<WeightSource>>,
}

impl ModelFiles<'_> {
    /// Reads a file; `None` if it does not exist.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match &self.packed {
            Some(packed) => Ok(packed.metadata().get(name).map(|text| text.as_bytes().to_vec())),
            None => match read_bytes(&self.root.join(name)) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(kiln_nn::Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error.into()),
            },
        }
    }

    /// Reads and parses a JSON file.
    fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let parse = |bytes: Vec<u8>| Ok(parse(&self.root.join(name), &bytes)?);
        self.read(name)?.map(parse).transpose()
    }

    fn component<C: ComponentConfig>(&self) -> Result<Option<ModelComponent<C>>> {
        let file = format!("{}/config.json", C::COMPONENT.folder());
        let Some(config) = self.read_json::<C>(&file)? else { return Ok(None) };
        if let Some(what) = config.problem() {
            return Err(Error::config(self.root.join(file), what));
        }
        let path = self.root.join(C::COMPONENT.folder());
        Ok(Some(match &self.packed {
            Some(file) => ModelComponent::packed(file, path, config),
            None => ModelComponent::lazy(path, config),
        }))
    }

    fn tokenizer(&self) -> Result<Option<TokenizerFiles>> {
        let Some(tokenizer) = self.read("tokenizer/tokenizer.json")? else { return Ok(None) };
        let path = self.root.join("tokenizer/tokenizer.json");
        let config: TokenizerConfig = self.read_json("tokenizer/tokenizer_config.json")?.unwrap_or_default();
        let template = self.read("tokenizer/chat_template.jinja")?;
        let template = template.map(|text| String::from_utf8_lossy(&text).into_owned());
        let config = config.with_chat_template(template);
        Ok(Some(TokenizerFiles { path, tokenizer: TokenizerData::Json(tokenizer), config }))
    }

    fn default_size(&self, family: &Family) -> Result<usize> {
        let stored = self.read_json::<usize>("kiln.default_size")?;
        Ok(stored.unwrap_or(family.full_size).clamp(family.latent.pixels_per_token(), 4096))
    }

    fn defaults(&self) -> Result<ModelDefaults> {
        const MAX_STEPS: usize = 1000;
        let steps = self.read_json::<usize>("kiln.default_steps")?.map(|n| n.clamp(1, MAX_STEPS));
        let guidance = self.read_json::<f32>("kiln.default_guidance")?;
        if let Some(g) = guidance.filter(|g| !(g.is_finite() && *g >= 0.0)) {
            let what = format!("guidance must be a number of at least 0, found {g}");
            return Err(Error::config(self.root.join("kiln.default_guidance"), what));
        }
        Ok(ModelDefaults { steps, guidance })
    }

    fn variant(&self) -> Result<Variant> {
        let Some(index) = self.read_json::<ModelIndex>("model_index.json")? else {
            let what = "there is no `model_index.json` in it: not a model in diffusers' layout";
            let exists = self.packed.is_some() || self.root.exists();
            return Err(Error::config(self.root, if exists { what } else { "no such folder" }));
        };
        // diffusers makes a scheduler of this class, whatever class its own configuration names.
        let scheduler = index.scheduler.get(1).and_then(Value::as_str);
        if let Some(class) = scheduler.filter(|class| *class != SCHEDULER) {
            let what = format!("the scheduler is `{class}`, expected `{SCHEDULER}`");
            return Err(Error::config(self.root.join("model_index.json"), what));
        }
        let unknown = || {
            let (found, known) = (&index.class_name, published_names());
            let what = format!("the pipeline is `{found}`, expected one of the {known} family");
            Error::config(self.root.join("model_index.json"), what)
        };
        Family::of_pipeline(&index.class_name, index.is_distilled).ok_or_else(unknown)
    }
}

/// Opens a model in a folder.
pub(super) fn open_folder(path: &Path) -> Result<Model> {
    open(&ModelFiles { root: path, packed: None })
}

/// Opens a model packed into one file.
pub(super) fn open_packed(source: Arc<WeightSource>) -> Result<Model> {
    let path = source.path().to_path_buf();
    open(&ModelFiles { root: &path, packed: Some(source) })
}

/// Returns the default image size and other defaults that a file's metadata holds.
pub(super) fn stored_defaults(source: &WeightSource, family: &Family) -> Result<(usize, ModelDefaults)> {
    let files = ModelFiles { root: source.path(), packed: Some(Arc::new(source.clone())) };
    Ok((files.default_size(family)?, files.defaults()?))
}

fn open(files: &ModelFiles<'_>) -> Result<Model> {
    let variant = files.variant()?;
    let missing = || Error::config(files.root, "there is no `transformer` with a `config.json` in it");
    let transformer = files.component::<transformer::Config>()?.ok_or_else(missing)?;
    const SCHEDULER_CONFIG: &str = "scheduler/scheduler_config.json";
    let scheduler: SchedulerConfig = files.read_json(SCHEDULER_CONFIG)?.unwrap_or_default();
    if let Some(what) = scheduler.unsupported() {
        return Err(Error::config(files.root.join(SCHEDULER_CONFIG), what));
    }
    let scheduler = SchedulerConfig { dynamic_shift: variant.family.shift, ..scheduler };
    let model = Model {
        tokenizer: files.tokenizer()?,
        scheduler,
        default_size: files.default_size(variant.family)?,
        defaults: files.defaults()?,
        card: files.packed.as_ref().and_then(|packed| packed.metadata().get("model_card").cloned()),
        ..Model::new(files.root, variant, transformer, files.component()?, files.component()?)
    };
    model.check_components()?;
    Ok(model)
}

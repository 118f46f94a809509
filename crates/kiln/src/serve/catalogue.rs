//! The models, LoRAs and autoencoders that requests may name.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_engine::{Model, Variant};
use kiln_server::{Catalogue, JobError, ModelInfo};

use crate::args::ServeArgs;
use crate::failure::Failure;
use crate::models::Found;

const ENDING: &str = "safetensors";
/// How long the list of models is believed.
const FRESH: Duration = Duration::from_secs(5);

/// Every model, by the name that requests use.
pub struct Models {
    /// What is used when none is named.
    default: (String, Found),
    loras: Option<PathBuf>,
    vaes: Option<PathBuf>,
    known: Mutex<Known>,
    /// Models that were used, by place: their files are opened once.
    models: Mutex<HashMap<PathBuf, Arc<Model>>>,
}

#[derive(Default)]
struct Known {
    since: Option<Instant>,
    list: Vec<ModelInfo>,
    /// `None` for what turned out to be no model.
    opened: HashMap<PathBuf, Option<ModelInfo>>,
}

impl Models {
    pub fn new(args: &ServeArgs) -> Result<Models, Failure> {
        let found = Found::find(args.model.as_deref())?;
        // Said now, and not to the first who asks for an image.
        let model = Arc::new(found.open()?);
        let name = match &found {
            Found::BuiltIn => crate::ember::NAME.to_owned(),
            Found::Named { name, .. } => name.clone(),
            Found::Path(path) => {
                let full = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                let part = if full.is_file() { full.file_stem() } else { full.file_name() };
                part.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        };
        let loras = args.loras.clone().or_else(|| super::beside_models("loras"));
        let vaes = args.vaes.clone().or_else(|| super::beside_models("vaes"));
        let models = Mutex::new(HashMap::from([(place(&found), model)]));
        Ok(Models { default: (name, found), loras, vaes, known: Mutex::default(), models })
    }

    /// One model and nothing else.
    pub fn only(name: &str, model: Arc<Model>) -> Models {
        let found = Found::Path(name.into());
        let known =
            Known { opened: HashMap::from([(place(&found), Some(about(&model)))]), ..Known::default() };
        let models = Mutex::new(HashMap::from([(place(&found), model)]));
        Models {
            default: (name.to_owned(), found),
            loras: None,
            vaes: None,
            known: Mutex::new(known),
            models,
        }
    }

    /// The model of this name, or the usual one, opened once.
    pub fn open(&self, name: Option<&str>) -> Result<Arc<Model>, JobError> {
        let gone = || JobError::request("model_not_found", "the model is no longer there");
        let found = self.find(name).ok_or_else(gone)?;
        let mut models = lock(&self.models);
        if let Some(model) = models.get(&place(&found)) {
            return Ok(Arc::clone(model));
        }
        let model = found.open().map_err(|failure| JobError::server("model_failed", failure.message))?;
        let model = Arc::new(model);
        models.insert(place(&found), Arc::clone(&model));
        Ok(model)
    }

    /// The model of this name, or the usual one.
    pub fn find(&self, name: Option<&str>) -> Option<Found> {
        match name {
            None => Some(self.default.1.clone()),
            Some(name) if name == self.default.0 => Some(self.default.1.clone()),
            Some(name) => Found::all().into_iter().find(|(known, _)| known == name).map(|(_, found)| found),
        }
    }

    /// The file of a LoRA.
    pub fn lora(&self, name: &str) -> Option<PathBuf> {
        file(self.loras.as_deref(), name)
    }

    /// The file of an autoencoder.
    pub fn vae(&self, name: &str) -> Option<PathBuf> {
        file(self.vaes.as_deref(), name)
    }

    fn refresh(&self, known: &mut Known) {
        let others = Found::all().into_iter().filter(|(name, _)| *name != self.default.0);
        let all = std::iter::once(self.default.clone()).chain(others);
        known.list = all
            .filter_map(|(name, found)| {
                let about = known
                    .opened
                    .entry(place(&found))
                    .or_insert_with(|| Some(about(&found.open().ok()?)))
                    .clone()?;
                Some(ModelInfo { default: name == self.default.0, name, ..about })
            })
            .collect();
        known.since = Some(Instant::now());
    }
}

/// Where a model is.
fn place(found: &Found) -> PathBuf {
    match found {
        Found::BuiltIn => PathBuf::from(crate::ember::NAME),
        Found::Named { path, .. } | Found::Path(path) => path.clone(),
    }
}

/// The names of the weight files in a folder.
fn names(folder: Option<&Path>) -> Vec<String> {
    let entries = folder.into_iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let name = |path: PathBuf| {
        let is_one = path.extension().is_some_and(|ending| ending == ENDING) && path.is_file();
        is_one.then(|| path.file_stem()?.to_str().map(str::to_owned))?
    };
    let mut names: Vec<String> = entries.filter_map(|entry| name(entry.path())).collect();
    names.sort();
    names
}

/// The file of this name in a folder. A name is one of the list, so it can't lead out of the folder.
fn file(folder: Option<&Path>, name: &str) -> Option<PathBuf> {
    let known = names(folder).iter().any(|known| known == name);
    known.then(|| Some(folder?.join(format!("{name}.{ENDING}"))))?
}

/// What there is to know of a model without its weights.
fn about(model: &Model) -> ModelInfo {
    ModelInfo {
        name: String::new(),
        default: false,
        size: model.default_size as u32,
        sides: model.trained_sides().map(|sides| (*sides.start() as u32, *sides.end() as u32)),
        steps: model.default_steps() as u32,
        guidance: model.default_guidance(),
        negative: model.variant == Variant::Base,
    }
}

impl Catalogue for Models {
    fn models(&self) -> Vec<ModelInfo> {
        let mut known = lock(&self.known);
        if known.since.is_none_or(|since| since.elapsed() > FRESH) {
            self.refresh(&mut known);
        }
        known.list.clone()
    }

    fn loras(&self) -> Vec<String> {
        names(self.loras.as_deref())
    }

    fn vaes(&self) -> Vec<String> {
        names(self.vaes.as_deref())
    }
}

/// [`Models`], shared by the server and the worker.
pub struct Shared(pub Arc<Models>);

impl Catalogue for Shared {
    fn models(&self) -> Vec<ModelInfo> {
        self.0.models()
    }

    fn loras(&self) -> Vec<String> {
        self.0.loras()
    }

    fn vaes(&self) -> Vec<String> {
        self.0.vaes()
    }
}

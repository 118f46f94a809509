//! The models and LoRAs that requests may name.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_model::Variant;
use kiln_server::{Catalogue, ModelInfo};

use crate::args::ServeArgs;
use crate::failure::Failure;
use crate::models::Found;

const ENDING: &str = "safetensors";
/// How long the list of models is believed.
const FRESH: Duration = Duration::from_secs(5);

/// Every model, by the name that requests use.
pub struct Models {
    /// What is painted with when none is named.
    default: (String, Found),
    loras: Option<PathBuf>,
    known: Mutex<Known>,
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
        // Said now, and not to the first who asks for a picture.
        found.open()?;
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
        Ok(Models { default: (name, found), loras, known: Mutex::default() })
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
        let known = self.loras().iter().any(|lora| lora == name);
        known.then(|| Some(self.loras.as_ref()?.join(format!("{name}.{ENDING}"))))?
    }

    fn refresh(&self, known: &mut Known) {
        let others = Found::all().into_iter().filter(|(name, _)| *name != self.default.0);
        let all = std::iter::once(self.default.clone()).chain(others);
        known.list = all
            .filter_map(|(name, found)| {
                let place = match &found {
                    Found::BuiltIn => PathBuf::from(crate::ember::NAME),
                    Found::Named { path, .. } | Found::Path(path) => path.clone(),
                };
                let about = known.opened.entry(place).or_insert_with(|| about(&found)).clone()?;
                Some(ModelInfo { default: name == self.default.0, name, ..about })
            })
            .collect();
        known.since = Some(Instant::now());
    }
}

/// What there is to know of a model without its weights.
fn about(found: &Found) -> Option<ModelInfo> {
    let folder = found.open().ok()?;
    Some(ModelInfo {
        name: String::new(),
        default: false,
        size: folder.default_size as u32,
        sides: folder.trained_sides().map(|sides| (*sides.start() as u32, *sides.end() as u32)),
        steps: folder.default_steps() as u32,
        guidance: folder.default_guidance(),
        negative: folder.variant == Variant::Base,
    })
}

impl Catalogue for Models {
    fn models(&self) -> Vec<ModelInfo> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.since.is_none_or(|since| since.elapsed() > FRESH) {
            self.refresh(&mut known);
        }
        known.list.clone()
    }

    fn loras(&self) -> Vec<String> {
        let entries =
            self.loras.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        let name = |path: PathBuf| {
            let is_one = path.extension().is_some_and(|ending| ending == ENDING) && path.is_file();
            is_one.then(|| path.file_stem()?.to_str().map(str::to_owned))?
        };
        let mut names: Vec<String> = entries.filter_map(|entry| name(entry.path())).collect();
        names.sort();
        names
    }
}

/// [`Models`], shared by the server and the painter.
pub struct Shared(pub Arc<Models>);

impl Catalogue for Shared {
    fn models(&self) -> Vec<ModelInfo> {
        self.0.models()
    }

    fn loras(&self) -> Vec<String> {
        self.0.loras()
    }
}

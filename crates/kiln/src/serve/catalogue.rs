//! The models, LoRAs and autoencoders that requests may name.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_catalog::{ModelLocation, ember};
use kiln_engine::Model;
use kiln_server::{Catalogue, DownloadableModel, ErrorCode, JobError, JobInputs, LoraInfo, ModelInfo};

use super::errors::job_error;
use super::files::WeightFolders;
use super::inputs::JobInputResolver;
use super::upsample::PromptUpsampling;
use super::{downloads, files};
use crate::args::{GeneratorArgs, UpsampleSource};
use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorContext};
use crate::hub::offer::{self, OfferOptions};
use crate::models;

/// How long a list of the models is used before it is read again.
const LIST_LIFETIME: Duration = Duration::from_secs(5);

/// The models, LoRAs and autoencoders by name; models are opened once.
pub struct ModelCatalogue {
    /// The model of requests that name none.
    default: (String, ModelLocation),
    pub files: WeightFolders,
    /// Whether clients may download models.
    downloads: bool,
    /// What rewrites prompts.
    upsampling: PromptUpsampling,
    list: Mutex<ModelList>,
    /// Opened models, by [`model_key`].
    models: Mutex<HashMap<PathBuf, Arc<Model>>>,
}

#[derive(Default)]
struct ModelList {
    read_at: Option<Instant>,
    models: Vec<ModelInfo>,
    /// Models that can't be used, each with the reason.
    unusable: Vec<(String, String)>,
    /// By [`model_key`]; otherwise why the model can't be used, or `None` for a part of a model.
    infos: HashMap<PathBuf, Result<ModelInfo, Option<String>>>,
}

impl ModelCatalogue {
    /// Opens the default model. `downloads` says whether clients may download others, `upsample` what rewrites prompts.
    pub fn new(
        args: &GeneratorArgs,
        downloads: bool,
        upsample: &UpsampleSource,
    ) -> Result<ModelCatalogue, CliError> {
        let model = args.model.clone().or_else(models::default_model);
        let options = OfferOptions { yes: args.yes, quiet: args.json };
        // No Ctrl-C handler yet: it ends the process, and the next download resumes.
        let location = offer::resolve(model.as_deref(), options, &CancelFlag::default());
        // Opened now, so that a bad model is an error at startup.
        let opened = location.and_then(|location| Ok((location.open()?, location)));
        let (model, location) = if args.model.is_none() && model.is_some() {
            opened.with_context(|| format!("using the default model, {}", models::default_source()))?
        } else {
            opened?
        };
        let model = Arc::new(model);
        models::refuse_ambiguous(&model, args.vae.is_some())?;
        let name = match &location {
            ModelLocation::BuiltIn => ember::NAME.to_owned(),
            ModelLocation::BuiltInBase => ember::BASE.to_owned(),
            ModelLocation::Named { name, .. } => name.clone(),
            ModelLocation::Path(path) => {
                let full = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                let name = if full.is_file() { full.file_stem() } else { full.file_name() };
                name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        };
        // Whole paths: errors cut folders off.
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        let loras = args.loras.clone().or_else(|| files::next_to_models("loras")).map(absolute);
        let vaes = args.vaes.clone().or_else(|| files::next_to_models("vaes")).map(absolute);
        let models = Mutex::new(HashMap::from([(model_key(&location), model)]));
        Ok(ModelCatalogue {
            default: (name, location),
            files: WeightFolders { loras, vaes },
            downloads,
            upsampling: PromptUpsampling::new(upsample, &args.machine)?,
            list: Mutex::default(),
            models,
        })
    }

    /// Returns a catalogue of a single model.
    pub fn single(name: &str, model: Arc<Model>) -> ModelCatalogue {
        let location = ModelLocation::Path(name.into());
        let upsampling = PromptUpsampling::default();
        let infos = HashMap::from([(model_key(&location), Ok(model_info(&model, &upsampling)))]);
        let models = Mutex::new(HashMap::from([(model_key(&location), model)]));
        ModelCatalogue {
            default: (name.to_owned(), location),
            files: WeightFolders { loras: None, vaes: None },
            downloads: false,
            upsampling,
            list: Mutex::new(ModelList { infos, ..ModelList::default() }),
            models,
        }
    }

    /// Reads every model again when it is next needed: its files may have changed. A signal asks for it.
    #[cfg_attr(windows, allow(dead_code))]
    pub fn reload(&self) {
        lock(&self.models).clear();
        *lock(&self.list) = ModelList::default();
    }

    /// Opens the model of this name, or the default one.
    pub fn open(&self, name: Option<&str>) -> Result<Arc<Model>, JobError> {
        let missing = || JobError::new(ErrorCode::ModelNotFound, "the model no longer exists");
        let location = self.find(name).ok_or_else(missing)?;
        let mut models = lock(&self.models);
        if let Some(model) = models.get(&model_key(&location)) {
            return Ok(Arc::clone(model));
        }
        let model = location.open().map_err(|error| job_error(&error))?;
        let model = Arc::new(model);
        models.insert(model_key(&location), Arc::clone(&model));
        Ok(model)
    }

    /// Finds the model of this name, or the default one.
    pub fn find(&self, name: Option<&str>) -> Option<ModelLocation> {
        match name {
            None => Some(self.default.1.clone()),
            Some(name) if name == self.default.0 => Some(self.default.1.clone()),
            Some(name) => {
                let mut all = models::folders().all().into_iter();
                all.find(|(known, _)| known == name).map(|(_, location)| location)
            }
        }
    }

    /// Reads the list of models.
    fn read_list(&self, list: &mut ModelList) {
        let others = models::folders().all().into_iter().filter(|(name, _)| *name != self.default.0);
        let all = std::iter::once(self.default.clone()).chain(others);
        (list.models, list.unusable) = (Vec::new(), Vec::new());
        for (name, location) in all {
            let describe = || describe(&location, &self.upsampling);
            match list.infos.entry(model_key(&location)).or_insert_with(describe) {
                Ok(info) => {
                    let default = name == self.default.0;
                    list.models.push(ModelInfo { default, name, ..info.clone() });
                }
                Err(reason) => list.unusable.extend(reason.clone().map(|reason| (name, reason))),
            }
        }
        list.read_at = Some(Instant::now());
    }
}

/// Returns a key that identifies a model: its path, or a built-in model's name.
fn model_key(location: &ModelLocation) -> PathBuf {
    match location {
        ModelLocation::BuiltIn => PathBuf::from(ember::NAME),
        ModelLocation::BuiltInBase => PathBuf::from(ember::BASE),
        ModelLocation::Named { path, .. } | ModelLocation::Path(path) => path.clone(),
    }
}

/// Describes a model whose files are whole; otherwise says why it can't be used, unless it is only a part of one.
fn describe(location: &ModelLocation, upsampling: &PromptUpsampling) -> Result<ModelInfo, Option<String>> {
    let model = location.open().map_err(|_| None)?;
    // The files of a models folder may be parts of models, which can't read prompts.
    if model.text_encoder.is_none() {
        return Err(None);
    }
    check_files(&model).map_err(|error| Some(kiln_base::without_folders(&error.to_string()).into_owned()))?;
    Ok(model_info(&model, upsampling))
}

/// Opens every file of a model: each must hold what its header says.
pub fn check_files(model: &Model) -> kiln_engine::Result<()> {
    model.components().try_for_each(|component| component.weights().map(drop))
}

/// Describes a model, without reading its weights.
fn model_info(model: &Model, upsampling: &PromptUpsampling) -> ModelInfo {
    ModelInfo {
        name: String::new(),
        default: false,
        size: model.default_size as u32,
        unit: model.pixels_per_token() as u32,
        sides: model.trained_sides().map(|sides| (*sides.start() as u32, *sides.end() as u32)),
        steps: model.default_steps() as u32,
        guidance: model.default_guidance(),
        negative: model.variant.takes_negative_prompt(),
        rewrites: upsampling.is_available(model),
    }
}

impl Catalogue for ModelCatalogue {
    fn models(&self) -> Vec<ModelInfo> {
        let mut list = lock(&self.list);
        if list.read_at.is_none_or(|read_at| read_at.elapsed() > LIST_LIFETIME) {
            self.read_list(&mut list);
        }
        list.models.clone()
    }

    fn loras(&self) -> Vec<String> {
        files::names(self.files.loras.as_deref())
    }

    fn vaes(&self) -> Vec<String> {
        files::names(self.files.vaes.as_deref())
    }

    fn lora_details(&self) -> Vec<LoraInfo> {
        files::lora_details(self.files.loras.as_deref())
    }

    fn lora_preview(&self, name: &str) -> Option<Vec<u8>> {
        files::lora_preview(self.files.loras.as_deref(), name)
    }

    fn lora_file(&self, name: &str) -> Option<PathBuf> {
        self.files.lora(name)
    }

    fn downloadable(&self) -> Vec<DownloadableModel> {
        if self.downloads { downloads::models() } else { Vec::new() }
    }

    fn download(&self, name: &str, on_progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<(), JobError> {
        downloads::run(name, on_progress)?;
        // List the new model at once.
        lock(&self.list).read_at = None;
        Ok(())
    }

    fn unusable_models(&self) -> Vec<(String, String)> {
        self.models();
        lock(&self.list).unusable.clone()
    }

    fn refresh(&self) {
        let mut list = lock(&self.list);
        // Models that could not be opened may be complete by now.
        list.infos.retain(|_, info| info.is_ok());
        list.read_at = None;
    }

    fn model_hash(&self, name: &str) -> Option<String> {
        // Of models that are open: the others are not in use.
        let location = self.find(Some(name))?;
        let model = lock(&self.models).get(&model_key(&location)).cloned()?;
        model.transformer.fingerprint().ok().map(str::to_owned)
    }

    fn rewrite_prompt(
        &self,
        job: &JobInputs<'_>,
        temperature: f32,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<String, JobError> {
        let open = || self.open(job.request().model.as_deref().and_then(Path::to_str));
        let inputs = JobInputResolver { job, files: &self.files, default_vae: None };
        self.upsampling.rewrite(job.request(), open, &inputs, temperature, cancelled)
    }
}

//! Trains LoRAs for the server's clients, as `kiln train` does.

mod publish;
mod watcher;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use kiln_catalog::{ModelLocation, ember, user_cache};
use kiln_engine::{ComponentPaths, Device, ErrorKind, Explain, Model, Session, Settings, SharedDevice};
use kiln_server::{
    Catalogue as _, ErrorCode, JobError, TrainableModel, Trainer, TrainingCheck, TrainingEnd, TrainingFiles,
    TrainingProgress, TrainingTask,
};
use kiln_train::{Log, PreparedTraining, Preset, RunFiles, TrainRequest, check_variant, distilled_name};

use super::catalogue::ModelCatalogue;
use super::errors::job_error;
use super::files;
use super::turn::DeviceLock;
use crate::args::MachineArgs;
use crate::error::CliError;
use crate::models;
use watcher::ServerWatcher;

/// The file of the LoRA in a training's folder.
const LORA: &str = "lora.safetensors";
/// The folder of encoded images in a training's folder.
const CACHE: &str = "cache";

/// Trains with the engine, on the device of the image jobs.
pub struct ServerTrainer {
    models: Arc<ModelCatalogue>,
    /// Where finished LoRAs go.
    loras: PathBuf,
    machine: MachineArgs,
    /// The models of image jobs, the first on the device of trainings. They stay loaded beside a training if both fit.
    sessions: Vec<Arc<Session>>,
    turn: Arc<DeviceLock>,
    /// Whether memory ran out although both should have fitted: from then on one makes way for the other.
    runs_alone: AtomicBool,
}

impl ServerTrainer {
    pub fn new(
        models: Arc<ModelCatalogue>,
        machine: MachineArgs,
        sessions: Vec<Arc<Session>>,
        turn: Arc<DeviceLock>,
    ) -> Result<ServerTrainer, CliError> {
        let Some(loras) = models.files.loras.clone() else {
            return Err(CliError::usage("--train needs a folder for the LoRAs").hint("set one with --loras"));
        };
        // A training uses one device, the first.
        let mut machine = machine;
        machine.device.truncate(1);
        kiln_base::remove_stale(&loras);
        Ok(ServerTrainer { models, loras, machine, sessions, turn, runs_alone: AtomicBool::new(false) })
    }

    /// The model of this name and its location.
    fn open(&self, name: &str) -> Result<(ModelLocation, Arc<Model>), JobError> {
        if name == ember::BASE && self.models.find(Some(name)).is_none() {
            let location = models::folders().resolve(Some(Path::new(ember::BASE)));
            let opened = location.and_then(|location| Ok((location.open()?, location)));
            let (model, location) = opened.map_err(|error| job_error(&error))?;
            return Ok((location, Arc::new(model)));
        }
        let missing = || JobError::new(ErrorCode::ModelNotFound, "the model no longer exists");
        Ok((self.models.find(Some(name)).ok_or_else(missing)?, self.models.open(Some(name))?))
    }

    /// The name or path that leads to the model that a client calls this.
    fn path(&self, name: &Path) -> Result<PathBuf, JobError> {
        let (location, _) = self.open(name.to_str().unwrap_or_default())?;
        Ok(match location {
            ModelLocation::Named { name, .. } => name.into(),
            ModelLocation::Path(path) => path,
            ModelLocation::BuiltIn => ember::NAME.into(),
            ModelLocation::BuiltInBase => ember::BASE.into(),
        })
    }

    /// The training of a client's request, with paths instead of names.
    fn prepare(&self, task: TrainingTask<'_>, resume: bool) -> Result<PreparedTraining, JobError> {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let path = |name: &Option<PathBuf>| name.as_deref().map(|name| self.path(name)).transpose();
        let folder = absolute(task.folder);
        let request = TrainRequest {
            data: absolute(task.images),
            model: path(&task.request.model)?,
            sample_model: path(&task.request.sample_model)?,
            output: folder.join(LORA),
            cache_dir: Some(folder.join(CACHE)),
            resume,
            overwrite: !resume,
            ..task.request.clone()
        };
        let machine = self.machine.settings().map_err(|error| {
            tracing::error!("{error}");
            JobError::new(ErrorCode::TrainingFailed, error.message)
        })?;
        let prepare = || {
            let machine = Settings { text_cache: user_cache::texts()?, ..machine };
            PreparedTraining::new(request, models::folders(), &ComponentPaths::default(), machine)
        };
        prepare().map_err(|error| job_error(&error))
    }

    /// A model to train on, with its presets.
    fn trainable(&self, name: &str, is_base: bool) -> Option<TrainableModel> {
        let (_, model) = self.open(name).ok()?;
        if is_base && check_variant(&model).is_err() {
            return None;
        }
        let distilled = distilled_name(Path::new(name)).and_then(|name| name.to_str().map(str::to_owned));
        let use_with = distilled.filter(|name| self.models.models().iter().any(|model| model.name == *name));
        let presets = Preset::ALL.iter().map(|preset| preset.request(&model)).collect();
        Some(TrainableModel { name: name.to_owned(), use_with, presets })
    }
}

fn is_about_memory(error: &kiln_train::Error) -> bool {
    matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::TooLarge)
}

/// The session's device, if the training fits there beside the models that are loaded.
fn share(session: &Session, training: &PreparedTraining) -> Option<SharedDevice> {
    let device = match training.job.machine.device {
        Device::Auto => Device::Cpu.to_string(),
        device => device.to_string(),
    };
    session.share(&training.needs(&device)).unwrap_or_else(|error| {
        tracing::warn!("the models of image jobs are unloaded for a training: {error}");
        None
    })
}

impl Trainer for ServerTrainer {
    fn models(&self) -> Vec<TrainableModel> {
        let listed = self.models.models();
        let mut names: Vec<&str> = listed.iter().map(|model| model.name.as_str()).collect();
        if ember::is_built_in(ember::BASE) && !names.contains(&ember::BASE) {
            names.push(ember::BASE);
        }
        let mut models: Vec<TrainableModel> =
            names.iter().filter_map(|name| self.trainable(name, true)).collect();
        // First the one that belongs to the default model.
        let default = listed.iter().find(|model| model.default).map(|model| model.name.as_str());
        models.sort_by_key(|model| {
            Some(model.name.as_str()) != default && model.use_with.as_deref() != default
        });
        models
    }

    fn distilled_model(&self, name: &str) -> Option<TrainableModel> {
        self.trainable(name, false)
    }

    fn check(&self, task: TrainingTask<'_>) -> Result<TrainingCheck, JobError> {
        let training = self.prepare(task, false)?;
        let clean = |note: &String| kiln_base::without_folders(note).into_owned();
        // It is not part of the training yet.
        let _ = std::fs::remove_dir_all(task.folder.join(CACHE));
        Ok(TrainingCheck {
            examples: training.job.data.epoch(),
            sizes: training.sizes(),
            warnings: training.job.data.notes.iter().map(clean).collect(),
            cost: training.estimate.to_string(),
        })
    }

    fn train(&self, task: TrainingTask<'_>, progress: &TrainingProgress) -> Result<TrainingEnd, JobError> {
        let turn = watcher::DeviceGuard::take(&self.turn, progress);
        if progress.is_stopped() {
            return Ok(TrainingEnd::Stopped);
        }
        turn.hold();
        std::fs::create_dir_all(task.folder).map_err(|error| {
            JobError::new(ErrorCode::Storage, format!("can't write the training: {error}"))
        })?;
        let resume = RunFiles::new(&task.folder.join(LORA)).state().is_file();
        let mut training = self.prepare(task, resume)?;
        let output = training.job.files.output.clone();
        let runs_alone = self.runs_alone.load(SeqCst);
        let session = self.sessions.first().map(|session| &**session);
        training.job.shared = session.filter(|_| !runs_alone).and_then(|session| share(session, &training));
        if training.job.shared.is_none() {
            self.sessions.iter().for_each(|session| session.reset());
        }
        let releases_memory = matches!(training.job.machine.device, Device::Cuda(_));
        let mut watcher = ServerWatcher { progress, turn, session, releases_memory, runs_alone };
        let outcome = training.run(&mut watcher);
        match outcome {
            Ok(outcome) if outcome.cancelled => return Ok(TrainingEnd::Stopped),
            Ok(outcome) if outcome.norms.is_zero() => {
                progress.note("the LoRA changes nothing: train longer or with a higher learning rate");
            }
            Ok(_) => {}
            Err(error) if error.is_cancelled() => return Ok(TrainingEnd::Stopped),
            Err(error) if !runs_alone && is_about_memory(&error) => {
                tracing::warn!("a training and image jobs don't fit into memory, and take turns: {error}");
                self.runs_alone.store(true, SeqCst);
                return Ok(TrainingEnd::Stopped);
            }
            Err(error) => return Err(job_error(&error)),
        }
        drop(watcher);
        let published = publish::publish(&output, &self.loras, &task.request.output.to_string_lossy());
        published.map(TrainingEnd::Done).map_err(|error| {
            tracing::error!(%error, "a LoRA can't be stored in `{}`", self.loras.display());
            JobError::new(ErrorCode::Storage, format!("the LoRA can't be stored: {error}"))
        })
    }

    fn files(&self, folder: &Path) -> TrainingFiles {
        let files = RunFiles::new(&folder.join(LORA));
        let losses = Log::read(&files.log());
        TrainingFiles {
            losses: losses.iter().map(|line| (line.step, line.loss, line.smoothed)).collect(),
            samples: kiln_train::sample_sheets(&files.samples()),
            resumable: files.state().is_file(),
        }
    }

    fn delete_lora(&self, name: &str) -> std::io::Result<bool> {
        let Some(path) = files::find(Some(&self.loras), name) else { return Ok(false) };
        match kiln_base::remove_file(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            removed => removed.map(|()| true),
        }
    }

    fn clean_up(&self, folder: &Path) {
        let files = RunFiles::new(&folder.join(LORA));
        let _ = std::fs::remove_dir_all(folder.join(CACHE));
        let _ = std::fs::remove_file(&files.output);
        let entries = std::fs::read_dir(&files.folder).into_iter().flatten().flatten();
        let weights = entries.map(|entry| entry.path());
        for path in weights.filter(|path| path.extension().is_some_and(|end| end == "safetensors")) {
            let _ = std::fs::remove_file(path);
        }
    }
}

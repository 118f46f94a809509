//! Trains LoRAs for the server's clients, as `kiln train` does: an order becomes its options.

mod publish;
mod watcher;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Parser;
use kiln_engine::{ComponentPaths, Device, Model, Session, Settings};
use kiln_models::{ModelLocation, ember};
use kiln_server::{
    Catalogue as _, JobError, Preset, PresetSettings, TrainableModel, Trainer, TrainingCheck, TrainingEnd,
    TrainingFiles, TrainingOrder, TrainingProgress, TrainingTask,
};
use kiln_train::{Log, PreparedTraining, RunFiles, check_variant, distilled_name};

use super::catalogue::ModelCatalogue;
use super::files;
use super::turn::DeviceLock;
use crate::args::{Cli, Command, MachineArgs, TrainArgs};
use crate::error::{CliError, ErrorKind};
use crate::{cache, models};
use watcher::ServerWatcher;

/// The file of the LoRA in a training's folder.
const LORA: &str = "lora.safetensors";
/// The folder of encoded pictures in a training's folder.
const CACHE: &str = "cache";
/// Noise levels for a small model such as Ember: high ones, where colours and outlines are decided.
const SMALL_MODEL_SIGMAS: &str = "1,0.95,0.9,0.8,0.7,0.5,0.3";

/// Trains with the engine, on the device of the image jobs.
pub struct ServerTrainer {
    models: Arc<ModelCatalogue>,
    /// Where finished LoRAs go.
    loras: PathBuf,
    machine: MachineArgs,
    /// The models of image jobs, which are unloaded for a training.
    sessions: Vec<Arc<Session>>,
    turn: Arc<DeviceLock>,
}

impl ServerTrainer {
    pub fn new(
        models: Arc<ModelCatalogue>,
        machine: MachineArgs,
        sessions: Vec<Arc<Session>>,
        turn: Arc<DeviceLock>,
    ) -> Result<ServerTrainer, CliError> {
        let Some(loras) = models.loras_folder().map(Path::to_owned) else {
            return Err(CliError::usage("--train needs a folder for the LoRAs").hint("set one with --loras"));
        };
        // A training uses one device, the first.
        let mut machine = machine;
        machine.device.truncate(1);
        Ok(ServerTrainer { models, loras, machine, sessions, turn })
    }

    /// The model of this name and its location.
    fn open(&self, name: &str) -> Result<(ModelLocation, Arc<Model>), JobError> {
        if name == ember::BASE && self.models.find(Some(name)).is_none() {
            let location = models::resolve(Some(Path::new(ember::BASE)));
            let opened = location.and_then(|location| Ok((location.open()?, location)));
            let (model, location) = opened.map_err(job_error)?;
            return Ok((location, Arc::new(model)));
        }
        let missing = || JobError::request("model_not_found", "the model no longer exists");
        Ok((self.models.find(Some(name)).ok_or_else(missing)?, self.models.open(Some(name))?))
    }

    /// The options of `kiln train` for an order.
    fn arguments(&self, task: TrainingTask<'_>, resume: bool) -> Result<TrainArgs, JobError> {
        let TrainingTask { order, pictures, folder } = task;
        let (location, model) = self.open(order.model.as_deref().unwrap_or_default())?;
        let model_name = match &location {
            ModelLocation::Named { name, .. } => name.into(),
            ModelLocation::Path(path) => path.clone(),
            ModelLocation::BuiltIn => ember::NAME.into(),
            ModelLocation::BuiltInBase => ember::BASE.into(),
        };
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let (pictures, folder) = (absolute(pictures), absolute(folder));
        let mut args: Vec<OsString> = vec!["kiln".into(), "train".into(), pictures.into()];
        let mut add = |option: &str, value: OsString| {
            let mut text = OsString::from(format!("--{option}="));
            text.push(value);
            args.push(text);
        };
        add("model", model_name.into());
        add("output", folder.join(LORA).into());
        add("cache-dir", folder.join(CACHE).into());
        for (option, value) in values(order, is_small(&model)) {
            add(option, value.into());
        }
        let flags = [
            ("--flip", order.flip),
            ("--no-captions", order.no_captions),
            ("--skip-bad", order.skip_bad),
            ("--resume", resume),
            ("--overwrite", !resume),
        ];
        args.extend(flags.iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag.into()));
        let parsed = Cli::try_parse_from(args).map_err(|error| {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            JobError::request("invalid_value", line.to_owned())
        })?;
        let Command::Train(args) = parsed.command else {
            return Err(JobError::server("training_failed", "not a training"));
        };
        Ok(TrainArgs { machine: self.machine.clone(), ..*args })
    }

    fn prepare(
        &self,
        task: TrainingTask<'_>,
        resume: bool,
        failed: fn(CliError) -> JobError,
    ) -> Result<PreparedTraining, JobError> {
        let args = self.arguments(task, resume)?;
        let prepare = || {
            let machine = Settings { text_cache: cache::texts()?, ..args.machine.settings()? };
            let folders = models::folders();
            Ok(PreparedTraining::new(args.request, folders, &ComponentPaths::default(), machine)?)
        };
        prepare().map_err(failed)
    }
}

/// The values of an order as options.
fn values(order: &TrainingOrder, is_small: bool) -> Vec<(&'static str, String)> {
    let join = |numbers: Vec<String>| (!numbers.is_empty()).then(|| numbers.join(","));
    let mut sigmas = join(order.sigmas.iter().map(f32::to_string).collect());
    if is_small {
        sigmas.get_or_insert(SMALL_MODEL_SIGMAS.into());
    }
    let cosine = order.cosine.unwrap_or(is_small).then(|| "cosine".to_owned());
    let number = |number: Option<u64>| number.map(|number| number.to_string());
    let values = [
        ("trigger", order.trigger.clone()),
        ("steps", number(order.steps)),
        ("rank", order.rank.map(|rank| rank.to_string())),
        ("targets", order.targets.clone()),
        ("resolution", join(order.resolution.iter().map(u32::to_string).collect())),
        ("lr", order.learning_rate.map(|rate| rate.to_string())),
        ("schedule", cosine),
        ("optimizer", order.optimizer.clone()),
        ("sigmas", sigmas),
        ("batch", order.batch.map(|batch| batch.to_string())),
        ("seed", number(order.seed)),
        ("save-every", number(order.save_every)),
        ("sample-every", number(order.sample_every.filter(|every| *every > 0))),
    ];
    let prompts = order.sample_prompts.iter().map(|prompt| ("sample-prompt", prompt.clone()));
    values.into_iter().filter_map(|(option, value)| Some((option, value?))).chain(prompts).collect()
}

/// Whether a model was trained for small images, such as Ember.
fn is_small(model: &Model) -> bool {
    model.trained_sides().is_some()
}

/// The settings of docs/training.md.
fn presets(model: &Model) -> Vec<PresetSettings> {
    let small = is_small(model);
    let settings = |preset, targets: &str, rank, steps, resolution: &[u32]| PresetSettings {
        preset,
        steps: if small { 200 } else { steps },
        rank,
        targets: targets.into(),
        resolution: if small { vec![model.default_size as u32] } else { resolution.to_vec() },
        learning_rate: if small { 2e-3 } else { 1e-4 },
    };
    vec![
        settings(Preset::Style, "style", 16, 1500, &[768]),
        settings(Preset::Subject, "full", 32, 1500, &[512, 768]),
        settings(Preset::Full, "full", 16, 1000, &[768]),
    ]
}

impl Trainer for ServerTrainer {
    fn models(&self) -> Vec<TrainableModel> {
        let listed = self.models.models();
        let mut names: Vec<&str> = listed.iter().map(|model| model.name.as_str()).collect();
        if ember::is_built_in(ember::BASE) && !names.contains(&ember::BASE) {
            names.push(ember::BASE);
        }
        let trainable = |name: &&str| {
            let (_, model) = self.open(name).ok().filter(|(_, model)| check_variant(model).is_ok())?;
            let distilled = distilled_name(Path::new(name)).and_then(|name| name.to_str().map(str::to_owned));
            let use_with = distilled.filter(|name| listed.iter().any(|model| model.name == *name));
            Some(TrainableModel { name: (*name).to_owned(), use_with, presets: presets(&model) })
        };
        let mut models: Vec<TrainableModel> = names.iter().filter_map(trainable).collect();
        // First the one that belongs to the default model.
        let default = listed.iter().find(|model| model.default).map(|model| model.name.as_str());
        models.sort_by_key(|model| {
            Some(model.name.as_str()) != default && model.use_with.as_deref() != default
        });
        models
    }

    fn check(&self, task: TrainingTask<'_>) -> Result<TrainingCheck, JobError> {
        let training = self.prepare(task, false, refused)?;
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
        self.sessions.iter().for_each(|session| session.reset());
        std::fs::create_dir_all(task.folder)
            .map_err(|error| JobError::server("storage", format!("can't write the training: {error}")))?;
        let resume = RunFiles::new(&task.folder.join(LORA)).state().is_file();
        let training = self.prepare(task, resume, job_error)?;
        let output = training.job.files.output.clone();
        // A GPU's memory rarely holds both; on a CPU weights stay in their files.
        let releases_memory = matches!(training.job.machine.device, Device::Cuda(_));
        let mut watcher = ServerWatcher { progress, turn, releases_memory };
        let outcome = training.run(&mut watcher);
        if let Err(kiln_train::Error::Diverged { what, .. }) = &outcome {
            // Resuming keeps the order's learning rate.
            let what = format!("{what}; start another training with a lower learning rate (a third)");
            return Err(JobError::server("training_failed", what));
        }
        match outcome.map_err(CliError::from) {
            Ok(outcome) if outcome.cancelled => return Ok(TrainingEnd::Stopped),
            Ok(outcome) if outcome.norms.is_zero() => {
                progress.note("the LoRA changes nothing: train longer or with a higher learning rate");
            }
            Ok(_) => {}
            Err(error) if error.kind == ErrorKind::Cancelled => return Ok(TrainingEnd::Stopped),
            Err(error) => return Err(job_error(error)),
        }
        drop(watcher);
        let published = publish::publish(&output, &self.loras, &task.order.name);
        published.map(TrainingEnd::Done).map_err(|error| {
            tracing::error!(%error, "a LoRA can't be stored in `{}`", self.loras.display());
            JobError::server("storage", format!("the LoRA can't be stored: {error}"))
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
        match std::fs::remove_file(path) {
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

/// An error about the pictures or settings of a client.
fn refused(error: CliError) -> JobError {
    let message = message(&error);
    if error.kind == ErrorKind::Cancelled {
        JobError::cancelled()
    } else {
        JobError::request("unusable", message)
    }
}

/// An error of a running training.
fn job_error(error: CliError) -> JobError {
    if error.kind == ErrorKind::Cancelled {
        return JobError::cancelled();
    }
    tracing::error!("{error}");
    JobError::server("training_failed", message(&error))
}

/// The message and the hint of an error, with the names of fields instead of options, and without folders.
fn message(error: &CliError) -> String {
    let field = |word: &str| match word.strip_prefix("--") {
        Some("lr") => "learning rate".to_owned(),
        Some(option) => format!("`{}`", option.replace('-', "_")),
        None => word.to_owned(),
    };
    // The server names the files.
    let hint = |hint: &String| hint.replace(", or choose another -o", "");
    let hint =
        |text: &String| format!("; {}", hint(text).split(' ').map(field).collect::<Vec<_>>().join(" "));
    let text = format!("{}{}", error.message, error.hint.as_ref().map_or(String::new(), hint));
    kiln_base::without_folders(&text).into_owned()
}

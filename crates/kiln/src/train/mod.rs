//! `kiln train`: from a folder of pictures to a LoRA.

mod options;
mod progress;

use std::path::Path;
use std::sync::Arc;

use kiln_engine::{Device, Model, Settings, probe_gpus, with_training_backend};
use kiln_train::dataset::{Dataset, list};
use kiln_train::{
    Cache, CostEstimate, Outcome, RunFiles, SamplePrompt, Sampler, TrainJob, TrainSettings, check_variant,
};

use crate::args::{CheckpointingArg, TrainArgs};
use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorContext, ErrorKind};
use crate::models::ModelLocation;
use crate::{cache, models, settings};
use progress::Display;

/// Runs the command.
pub fn run(mut args: TrainArgs) -> Result<(), CliError> {
    let cancel = CancelFlag::install();
    args.machine.fill_missing(settings::get());
    options::check(&args)?;
    let files = RunFiles::new(&args.output);
    let location = args.model.clone().or_else(models::default_model);
    let model = Arc::new(ModelLocation::resolve(location.as_deref())?.open_with(&args.components.paths())?);
    if !args.distilled_anyway {
        check_variant(&model)?;
    }
    let folder = cache_folder(&args)?;
    let data = list(&args.data).and_then(|listing| {
        Dataset::new(listing, options::data(&args.pictures, &model), &Cache::new(&folder))
    });
    let data = data.with_context(|| format!("reading the pictures in `{}`", args.data.display()))?;
    let mut display = Display::new(args.saving.quiet, cancel.clone());
    data.notes.iter().for_each(|note| display.tell(note));
    let mut machine = args.machine.settings()?;
    if machine.device == Device::Auto {
        machine.device = if probe_gpus().usable { Device::Cuda(0) } else { Device::Cpu };
    }
    let settings = choose(&args, &model, &data, &machine, &display)?;
    if args.pictures.dry_run {
        return Ok(());
    }
    files.prepare(args.saving.resume, args.saving.overwrite)?;
    let options = options::run(&args);
    let estimate = CostEstimate::new(&model, &data, &settings, args.steps.batch as usize)?;
    files.check_space(estimate.disk(options.steps.div_ceil(options.save_every)))?;
    display.sampler = sampler(&args, &model, &data, &machine, &files, &display)?;
    cancel.poll();
    let job = TrainJob {
        model,
        data,
        cache: folder,
        settings,
        auto_checkpointing: args.steps.checkpointing == CheckpointingArg::Auto,
        batch: args.steps.batch as usize,
        accumulation: args.steps.accumulate as usize,
        options,
        files: files.clone(),
        resume: args.saving.resume,
        watcher: &mut display,
    };
    let outcome = with_training_backend(&machine, job).map_err(CliError::from).and_then(|result| Ok(result?));
    display.finish();
    let outcome = outcome.map_err(|error| with_state(error, &files))?;
    report(&outcome, &files, &display)
}

/// The folder of encoded pictures and captions.
fn cache_folder(args: &TrainArgs) -> Result<std::path::PathBuf, CliError> {
    let default = || cache::folder().map(|folder| folder.join("train"));
    args.pictures.cache_dir.clone().or_else(default).ok_or_else(|| {
        CliError::usage("there is no cache folder for encoded pictures").hint("name one with --cache-dir")
    })
}

/// Chooses the settings, and tells what the training will cost.
fn choose(
    args: &TrainArgs,
    model: &Model,
    data: &Dataset,
    machine: &Settings,
    display: &Display,
) -> Result<TrainSettings, CliError> {
    let settings = options::settings(args, model, machine);
    let sizes: Vec<String> =
        data.sizes().iter().map(|([width, height], count)| format!("{width}x{height} ({count})")).collect();
    display.tell(&format!("{} examples: {}", data.epoch(), sizes.join(", ")));
    display.tell(&format!("base: {}, {}", model.recorded_name(), model.described_variant()));
    display.tell(&CostEstimate::new(model, data, &settings, args.steps.batch as usize)?.to_string());
    Ok(settings)
}

/// What generates sample images, if they are asked for.
fn sampler(
    args: &TrainArgs,
    model: &Arc<Model>,
    data: &Dataset,
    machine: &Settings,
    files: &RunFiles,
    display: &Display,
) -> Result<Option<Sampler>, CliError> {
    let samples = &args.samples;
    if samples.sample_every.is_none() {
        return Ok(None);
    }
    let model = match &samples.sample_model {
        Some(path) => {
            let other = ModelLocation::resolve(Some(path)).and_then(|location| location.open());
            let other = other.with_context(|| "opening --sample-model".into())?;
            if other.transformer.config.linear_layers() != model.transformer.config.linear_layers() {
                let what = format!("`{}` has other layers than the base model", path.display());
                return Err(CliError::usage(what).hint("name the distilled model of the same size"));
            }
            Arc::new(other)
        }
        None => match args.model.as_deref().and_then(|base| distilled(base, model)) {
            Some((name, other)) => {
                display.tell(&format!("samples are generated with {name}, the distilled model"));
                Arc::new(other)
            }
            None => Arc::clone(model),
        },
    };
    let sizes = data.sizes();
    let size = sizes.iter().max_by_key(|(_, count)| **count).map_or([model.default_size as u32; 2], |s| *s.0);
    let named = |prompt: &String| SamplePrompt { prompt: prompt.clone(), references: Vec::new(), size };
    let prompts = match &samples.sample_prompts[..] {
        [] => SamplePrompt::of_data(data),
        prompts => prompts.iter().map(named).collect(),
    };
    if prompts.is_empty() {
        return Err(
            CliError::usage("there is no caption to sample").hint("give a prompt with --sample-prompt")
        );
    }
    let (seed, steps, folder) = (samples.sample_seed, samples.sample_steps, files.samples());
    let device = if machine.device == Device::Auto { Device::Cpu } else { machine.device };
    let settings = Settings { text_cache: cache::texts()?, device, ..machine.clone() };
    Ok(Some(Sampler { model, settings, prompts, seed, steps, folder }))
}

/// The distilled model beside a base model, if it is at hand: `klein-4b` for `klein-base-4b`.
fn distilled(base: &Path, model: &Model) -> Option<(String, Model)> {
    let name = base.file_name()?.to_str()?;
    let path = base.with_file_name(name.replacen("-base", "", 1));
    let other = (path != base).then(|| ModelLocation::resolve(Some(&path))?.open())?.ok()?;
    let fits = other.transformer.config.linear_layers() == model.transformer.config.linear_layers();
    fits.then(|| (path.display().to_string(), other))
}

/// Says what to do about a training that stopped, and that its last checkpoint is kept.
fn with_state(mut error: CliError, files: &RunFiles) -> CliError {
    let hint =
        error.hint.take().unwrap_or("check that the disk is not full and the folder is writable".into());
    let is_write = error.kind == ErrorKind::Failed && error.message.starts_with("can't write");
    let kept = if is_write && files.state().is_file() {
        "; the last checkpoint is kept: continue with --resume"
    } else {
        ""
    };
    CliError { hint: Some(hint + kept).filter(|_| error.kind == ErrorKind::Failed), ..error }
}

/// Tells how a training ended.
fn report(outcome: &Outcome, files: &RunFiles, display: &Display) -> Result<(), CliError> {
    if outcome.cancelled {
        display.tell(&format!(
            "stopped after step {}; the state is in `{}`: continue with --resume",
            outcome.step,
            files.folder.display()
        ));
        return Err(CliError::cancelled());
    }
    display.tell(&format!("norm of the update: {}", outcome.norms));
    if outcome.norms.is_nothing() {
        display.tell("the LoRA changes nothing: train longer or with a higher --lr");
    }
    display.tell(&format!("wrote `{}`", files.output.display()));
    display.tell(&format!("use it with: kiln generate \"…\" --lora {}", files.output.display()));
    Ok(())
}

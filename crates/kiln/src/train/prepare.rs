//! A training from its options, for the command line and the server.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{Model, Settings};
use kiln_train::dataset::{Dataset, list};
use kiln_train::{
    Cache, CostEstimate, RunFiles, SamplePrompt, Sampler, TrainJob, check_variant, with_default_device,
};

use super::options;
use crate::args::{CheckpointingArg, TrainArgs};
use crate::cache;
use crate::error::{CliError, ErrorContext};
use crate::models;

/// A training whose model, pictures and settings are checked. Nothing is loaded or written yet.
pub struct PreparedTraining {
    args: TrainArgs,
    pub job: TrainJob,
    pub estimate: CostEstimate,
}

impl PreparedTraining {
    /// Opens the model and reads every picture.
    pub fn new(args: TrainArgs) -> Result<PreparedTraining, CliError> {
        options::check(&args)?;
        let location = models::resolve(args.model.as_deref())?;
        let model = Arc::new(location.open_with(&args.components.paths())?);
        if !args.distilled_anyway {
            check_variant(&model)?;
        }
        let cache = cache_folder(&args)?;
        let data = list(&args.data).and_then(|listing| {
            Dataset::new(listing, options::data(&args.pictures, &model), &Cache::new(&cache))
        });
        let data = data.with_context(|| format!("reading the pictures in `{}`", args.data.display()))?;
        let machine = with_default_device(args.machine.settings()?);
        let job = TrainJob {
            settings: options::settings(&args, &model, &machine),
            model,
            data,
            cache,
            auto_checkpointing: args.steps.checkpointing == CheckpointingArg::Auto,
            batch: args.steps.batch as usize,
            accumulation: args.steps.accumulate as usize,
            options: options::run(&args),
            files: RunFiles::new(&args.output),
            resume: args.saving.resume,
            overwrite: args.saving.overwrite,
            machine,
        };
        let estimate = job.check()?;
        Ok(PreparedTraining { args, job, estimate })
    }

    /// The sizes of the pictures: `768x768 (12)`.
    pub fn sizes(&self) -> Vec<String> {
        let size = |([width, height], count): (&[u32; 2], &usize)| format!("{width}x{height} ({count})");
        self.job.data.sizes().iter().map(size).collect()
    }

    /// What generates sample images, if they are asked for. Tells which model it is, if it is another one.
    pub fn sampler(&self, tell: &dyn Fn(&str)) -> Result<Option<Sampler>, CliError> {
        let samples = &self.args.samples;
        if samples.sample_every.is_none() {
            return Ok(None);
        }
        let model = match &samples.sample_model {
            Some(path) => Arc::new(self.other_model(path)?),
            None => match self.args.model.as_deref().and_then(|base| distilled(base, &self.job.model)) {
                Some((name, other)) => {
                    tell(&format!("samples are generated with {name}, the distilled model"));
                    Arc::new(other)
                }
                None => Arc::clone(&self.job.model),
            },
        };
        let sizes = self.job.data.sizes();
        let common = sizes.iter().max_by_key(|(_, count)| **count);
        let size = common.map_or([model.default_size as u32; 2], |size| *size.0);
        let named = |prompt: &String| SamplePrompt { prompt: prompt.clone(), references: Vec::new(), size };
        let prompts = match &samples.sample_prompts[..] {
            [] => SamplePrompt::of_data(&self.job.data),
            prompts => prompts.iter().map(named).collect(),
        };
        if prompts.is_empty() {
            let error = CliError::usage("there is no caption to sample");
            return Err(error.hint("give a prompt with --sample-prompt"));
        }
        let (seed, steps, folder) = (samples.sample_seed, samples.sample_steps, self.job.files.samples());
        let settings = Settings { text_cache: cache::texts()?, ..self.job.machine.clone() };
        Ok(Some(Sampler { model, settings, prompts, seed, steps, folder }))
    }

    fn other_model(&self, path: &Path) -> Result<Model, CliError> {
        let other = models::resolve(Some(path)).and_then(|location| Ok(location.open()?));
        let other = other.with_context(|| "opening --sample-model".into())?;
        if other.transformer.config.linear_layers() != self.job.model.transformer.config.linear_layers() {
            let what = format!("`{}` has other layers than the base model", path.display());
            return Err(CliError::usage(what).hint("name the distilled model of the same size"));
        }
        Ok(other)
    }
}

/// The folder of encoded pictures and captions.
fn cache_folder(args: &TrainArgs) -> Result<PathBuf, CliError> {
    let default = || cache::folder().map(|folder| folder.join("train"));
    args.pictures.cache_dir.clone().or_else(default).ok_or_else(|| {
        CliError::usage("there is no cache folder for encoded pictures").hint("name one with --cache-dir")
    })
}

/// The distilled model beside a base model, if it is at hand: `klein-4b` for `klein-base-4b`.
fn distilled(base: &Path, model: &Model) -> Option<(String, Model)> {
    let path = distilled_name(base)?;
    let other = models::resolve(Some(&path)).ok()?.open().ok()?;
    let fits = other.transformer.config.linear_layers() == model.transformer.config.linear_layers();
    fits.then(|| (path.display().to_string(), other))
}

/// The name of the distilled model of a base model; `None` if the name does not tell.
pub fn distilled_name(base: &Path) -> Option<PathBuf> {
    let path = base.with_file_name(base.file_name()?.to_str()?.replacen("-base", "", 1));
    (path != base).then_some(path)
}

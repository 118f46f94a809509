//! A training from its request, for the command line, the server and Python: the same checks in the same order.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_catalog::{ModelFolders, user_cache};
use kiln_engine::{ComponentPaths, Field, Model, Settings, TrainingNeeds, WeightBytes, hint, text};

use crate::dataset::{Dataset, list};
use crate::job::{JobWatcher, TrainJob, check_variant, with_default_device};
use crate::samples::{SamplePrompt, Sampler};
use crate::{Cache, Checkpointing, CostEstimate, Error, Outcome, Result, RunFiles, TrainRequest};

/// A training whose values, model and images are checked. Nothing is loaded or written yet.
pub struct PreparedTraining {
    request: TrainRequest,
    folders: ModelFolders,
    /// Everything that it needs.
    pub job: TrainJob,
    /// What it costs.
    pub estimate: CostEstimate,
}

impl PreparedTraining {
    /// Checks the request, opens its model, with some components from elsewhere, and reads every image.
    pub fn new(
        mut request: TrainRequest,
        folders: ModelFolders,
        components: &ComponentPaths,
        machine: Settings,
    ) -> Result<PreparedTraining> {
        request.check()?;
        let model = Arc::new(folders.resolve(request.model.as_deref())?.open_with(components)?);
        if !request.distilled_anyway {
            check_variant(&model)?;
        }
        if let Some(preset) = request.preset {
            request.fill_in(&preset.request(&model));
        }
        let cache = cache_folder(&request)?;
        let options = request.data_options(&model);
        let data =
            list(&request.data).and_then(|listing| Dataset::new(listing, options, &Cache::new(&cache)));
        let reading = || format!("reading the images in `{}`", request.data.display());
        let data = data.map_err(|error| error.with_context(reading()))?;
        let machine = with_default_device(machine);
        let job = TrainJob {
            settings: request.settings(&model, &machine),
            model,
            data,
            cache,
            auto_checkpointing: request.checkpointing.unwrap_or_default() == Checkpointing::Auto,
            batch: request.batch.unwrap_or(1) as usize,
            accumulation: request.accumulate.unwrap_or(1) as usize,
            options: request.run_options(),
            files: RunFiles::new(&request.output),
            resume: request.resume,
            overwrite: request.overwrite,
            machine,
            shared: None,
        };
        let estimate = job.check()?;
        Ok(PreparedTraining { request, folders, job, estimate })
    }

    /// The sizes of the images: `768x768 (12)`.
    pub fn sizes(&self) -> Vec<String> {
        let size = |([width, height], count): (&[u32; 2], &usize)| format!("{width}x{height} ({count})");
        self.job.data.sizes().iter().map(size).collect()
    }

    /// What it will hold of its device, named as `--device` takes it.
    pub fn needs<'a>(&'a self, device: &'a str) -> TrainingNeeds<'a> {
        let TrainJob { model, settings, options, .. } = &self.job;
        let precision = settings.base.linear(1);
        // Samples are generated with a model of the same layers, loaded beside this one.
        let samples = options.sample_every.map_or(0, |_| {
            let WeightBytes { text_encoder, transformer, dequantized, .. } = model.weight_bytes(precision);
            let rows = model.default_tokens();
            let image = model.memory_estimate([model.default_size; 2], rows, settings.dtype());
            text_encoder + transformer + dequantized + 2 * image.peak()
        });
        let CostEstimate { weights, adapter, activations, .. } = self.estimate;
        TrainingNeeds { device, model, precision, weights, state: adapter + samples, activations }
    }

    /// Checks all that the run would refuse at its start: the files to write, the device, the model of the samples. Nothing
    /// is written. `note` gets what the user should know.
    pub fn check_run(&self, note: &mut dyn FnMut(&str)) -> Result<()> {
        self.job.check_run()?;
        self.sampler(note).map(drop)
    }

    /// Trains to the end, or until the watcher cancels.
    pub fn run(self, watcher: &mut dyn JobWatcher) -> Result<Outcome> {
        self.job.check_run()?;
        let sampler = self.sampler(&mut |text| watcher.note(text))?;
        let lock = self.job.prepare_files(&self.estimate)?;
        self.job.run(lock, sampler, watcher)
    }

    /// What generates sample images, if they are asked for.
    fn sampler(&self, note: &mut dyn FnMut(&str)) -> Result<Option<Sampler>> {
        if self.job.options.sample_every.is_none() {
            return Ok(None);
        }
        let (request, base) = (&self.request, &self.job.model);
        let model = match &request.sample_model {
            Some(path) => Arc::new(self.sample_model(path)?),
            None => match request.model.as_deref().and_then(|name| self.distilled(name)) {
                Some((name, other)) => {
                    note(&format!("samples are generated with {name}, the distilled model"));
                    Arc::new(other)
                }
                None => Arc::clone(base),
            },
        };
        let sizes = self.job.data.sizes();
        let common = sizes.iter().max_by_key(|(_, count)| **count);
        let size = common.map_or([model.default_size as u32; 2], |size| *size.0);
        let named = |prompt: &String| SamplePrompt { prompt: prompt.clone(), references: Vec::new(), size };
        let prompts = match &request.sample_prompts[..] {
            [] => SamplePrompt::of_data(&self.job.data),
            prompts => prompts.iter().map(named).collect(),
        };
        if prompts.is_empty() {
            return Err(Error::value("there is no caption to sample")
                .with_hint(hint!["give a prompt with ", Field::SamplePrompts]));
        }
        Ok(Some(Sampler {
            model,
            settings: self.job.machine.clone(),
            prompts,
            seed: request.sample_seed.unwrap_or(42),
            steps: request.sample_steps,
            folder: self.job.files.samples(),
        }))
    }

    fn sample_model(&self, path: &Path) -> Result<Model> {
        let opened = self.folders.resolve(Some(path)).and_then(|location| location.open());
        let model =
            opened.map_err(|error| Error::from(error).with_context("opening the model of the samples"))?;
        if self.fits(&model) {
            return Ok(model);
        }
        let what = format!(" `{}` has other layers than the base model", path.display());
        Err(Error::value(text![Field::SampleModel, what])
            .with_hint("name the distilled model of the same size"))
    }

    /// The distilled model beside a base model, if it is at hand: `klein-4b` for `klein-base-4b`.
    fn distilled(&self, base: &Path) -> Option<(String, Model)> {
        let path = distilled_name(base)?;
        let model = self.folders.resolve(Some(&path)).ok()?.open().ok()?;
        self.fits(&model).then(|| (path.display().to_string(), model))
    }

    /// Whether a LoRA for the base model fits this one, too.
    fn fits(&self, model: &Model) -> bool {
        let layers = |model: &Model| model.transformer.config.linear_layers();
        layers(model) == layers(&self.job.model)
    }
}

/// The folder of encoded images and captions.
fn cache_folder(request: &TrainRequest) -> Result<PathBuf> {
    let default = || user_cache::folder().map(|folder| folder.join("train"));
    request.cache_dir.clone().or_else(default).ok_or_else(|| {
        Error::data("there is no cache folder for encoded images")
            .with_hint("set the variable KILN_CACHE_DIR")
    })
}

/// The name of the distilled model of a base model; `None` if the name does not tell.
pub fn distilled_name(base: &Path) -> Option<PathBuf> {
    let path = base.with_file_name(base.file_name()?.to_str()?.replacen("-base", "", 1));
    (path != base).then_some(path)
}

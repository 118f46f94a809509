//! Generates the server's jobs with the engine, as `kiln generate` does, keeping the model loaded between jobs.
//! So defaults, checks, recipes and errors are those of the command line.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use kiln_base::lock;
use kiln_engine::{Error, Event, FileRef, GeneratedImage, LoadedEngine, Plan, Session, Sink};
use kiln_engine::{ProgressTracker, Task as EngineTask};
use kiln_image::RgbImage;
use kiln_server::{FinishedImage, Generator, JobError, JobInputs, JobSink, LoadedModel, Task};

use super::catalogue::ModelCatalogue;
use super::errors::job_error;
use super::inputs::JobInputResolver;
use super::turn::DeviceLock;

/// The engine behind the server.
pub struct Worker {
    session: Arc<Session>,
    models: Arc<ModelCatalogue>,
    /// Taken by a training while it computes.
    turn: Arc<DeviceLock>,
    /// The autoencoder of jobs that name none.
    vae: Option<PathBuf>,
    /// The threshold of the step cache for jobs that name none.
    cache: Option<f32>,
    /// Models to load at startup, besides the default one.
    preload: Vec<String>,
}

impl Worker {
    pub fn new(session: Arc<Session>, models: Arc<ModelCatalogue>, vae: Option<PathBuf>) -> Worker {
        Worker { session, models, turn: Arc::default(), vae, cache: None, preload: Vec::new() }
    }

    /// Takes turns on the device with trainings.
    pub fn turn(self, turn: Arc<DeviceLock>) -> Worker {
        Worker { turn, ..self }
    }

    /// Uses the step cache with this threshold for jobs that name none.
    pub fn cache(self, cache: Option<f32>) -> Worker {
        Worker { cache, ..self }
    }

    /// Loads these models at startup, too.
    pub fn preload(self, preload: Vec<String>) -> Worker {
        Worker { preload, ..self }
    }
}

impl Generator for Worker {
    type Plan = Arc<Plan>;

    fn warm_up(&self) -> Result<(), JobError> {
        let load = |name: Option<&str>| {
            let model = self.models.open(name)?;
            self.session.load(&model, &LogSink).map_err(|error| job_error(&error))
        };
        for name in &self.preload {
            if let Err(error) = load(Some(name)) {
                tracing::error!(model = name, "failed to load a model: {error}");
            }
        }
        // The default model last: it is the one to keep.
        load(None)
    }

    fn loaded(&self) -> Vec<LoadedModel> {
        let loaded =
            self.session.loaded().into_iter().map(|LoadedEngine { info, model, load_time, free_memory }| {
                let path = model.recorded_name();
                let file = Path::new(&path)
                    .file_name()
                    .map_or(path.clone(), |name| name.to_string_lossy().into_owned());
                let stem = [".toml", ".gguf", ".safetensors"].iter().find_map(|end| file.strip_suffix(end));
                let name = stem.unwrap_or(&file).to_owned();
                LoadedModel {
                    name,
                    device: info.device,
                    backend: info.backend,
                    dtype: info.dtype.into(),
                    load_seconds: load_time.as_secs_f64(),
                    free_memory,
                }
            });
        loaded.collect()
    }

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Plan>, JobError> {
        let name = job.request().model.as_deref().and_then(Path::to_str);
        let model = self.models.open(name)?;
        let mut request = job.request().clone();
        if request.vae.is_none() {
            request.vae = self.vae.clone().map(FileRef::from);
        }
        request.cache = request.cache.or(self.cache);
        let inputs = JobInputResolver { job, files: &self.models.files, default_vae: self.vae.as_deref() };
        let plan = Plan::new(&model, &request, &inputs).map_err(|error| job_error(&error))?;
        if plan.upscale().is_none() {
            job.check_size(plan.width as u32, plan.height as u32)?;
        }
        // Tokenized here, outside the generating thread.
        plan.tokenize().map_err(|error| job_error(&error))?;
        Ok(Arc::new(plan))
    }

    fn batch_capacity(&self, plan: &Arc<Plan>) -> u32 {
        self.session.batch_capacity(plan) as u32
    }

    fn generate(&self, tasks: Vec<Task<Arc<Plan>>>) {
        let tasks: Vec<EngineTask> = tasks
            .into_iter()
            .map(|task| {
                let sink = Arc::new(JobSinkAdapter::new(&task.plan, task.sink));
                EngineTask { plan: task.plan, sink }
            })
            .collect();
        self.turn.wait_until_free();
        if !tasks.iter().all(|task| self.session.has_room(&task.plan)) {
            self.turn.claim_memory();
        }
        self.session.generate(&tasks);
    }

    fn finish(&self) {
        self.session.finish();
    }

    fn reset(&self) {
        self.session.reset();
    }
}

/// Passes the engine's events on to the server's job.
struct JobSinkAdapter {
    sink: Arc<dyn JobSink>,
    tracker: Mutex<ProgressTracker>,
    /// The server's error for a finished image that it could not store.
    rejected: Mutex<Option<JobError>>,
}

impl JobSinkAdapter {
    fn new(plan: &Plan, sink: Arc<dyn JobSink>) -> JobSinkAdapter {
        JobSinkAdapter { sink, tracker: Mutex::new(ProgressTracker::new(plan)), rejected: Mutex::new(None) }
    }

    fn rejected(&self) -> MutexGuard<'_, Option<JobError>> {
        lock(&self.rejected)
    }
}

impl Sink for JobSinkAdapter {
    fn cancelled(&self) -> bool {
        self.sink.cancelled()
    }

    fn event(&self, event: &Event) {
        match event {
            Event::Note(text) | Event::LoraApplied { report: text } => self.sink.note(text),
            Event::StepStarted { step: 0, images: own, batch: all, .. } => {
                self.sink.batch(*own as u32, *all as u32)
            }
            _ => {}
        }
        let progress = lock(&self.tracker).update(event);
        if let Some(progress) = progress {
            self.sink.progress(progress);
        }
    }

    fn wants_preview(&self) -> bool {
        self.sink.wants_preview()
    }

    fn preview(&self, image: RgbImage) {
        self.sink.preview(image);
    }

    fn image(&self, image: GeneratedImage) -> kiln_engine::Result<()> {
        let GeneratedImage { index, image, seed, steps, recipe, .. } = image;
        let recipe = recipe.without_folders().to_json();
        let finished = FinishedImage { index: index as u32, image, seed, steps, recipe };
        self.sink.image(finished).map_err(|error| {
            *self.rejected() = Some(error);
            Error::CANCELLED
        })
    }

    fn ended(&self, result: kiln_engine::Result<()>) {
        let rejected = self.rejected().take();
        self.sink.ended(rejected.map_or_else(|| result.map_err(|error| job_error(&error)), Err));
    }
}

/// Logs the notes of loading a model at startup, before there is any job.
struct LogSink;

impl Sink for LogSink {
    fn event(&self, event: &Event) {
        if let Event::Note(text) = event {
            tracing::info!("{text}");
        }
    }

    fn image(&self, _: GeneratedImage) -> kiln_engine::Result<()> {
        Ok(())
    }

    fn ended(&self, _: kiln_engine::Result<()>) {}
}

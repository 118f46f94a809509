//! Generates the server's jobs: each goes the way of `kiln generate`, with the model kept loaded between them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use kiln_base::lock;
use kiln_engine::{Error, Event, FileRef, Image, InputImage, Inputs, Plan, Session, Sink};
use kiln_engine::{Task as EngineTask, Tracker};
use kiln_image::Picture;
use kiln_server::{Finished, Generator, JobError, JobInputs, JobSink, Task};

use super::catalogue::Models;

/// The engine behind the server.
pub struct Worker {
    session: Session,
    models: Arc<Models>,
    /// The autoencoder for jobs that name none.
    vae: Option<PathBuf>,
}

impl Worker {
    pub fn new(session: Session, models: Arc<Models>, vae: Option<PathBuf>) -> Worker {
        Worker { session, models, vae }
    }
}

impl Generator for Worker {
    type Plan = Arc<Plan>;

    fn warm_up(&self) -> Result<(), JobError> {
        let model = self.models.open(None)?;
        self.session.load(&model, &Log).map_err(|error| job_error(&error))
    }

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Plan>, JobError> {
        let name = job.request().model.as_deref().and_then(Path::to_str);
        let model = self.models.open(name)?;
        let mut request = job.request().clone();
        if request.vae.is_none() {
            request.vae = self.vae.clone().map(FileRef::from);
        }
        let names = Names { job, models: &self.models, own_vae: self.vae.as_deref() };
        let plan = Plan::new(&model, &request, &names).and_then(|plan| {
            // Here the generator is not kept waiting for it.
            plan.tokenize()?;
            Ok(Arc::new(plan))
        });
        plan.map_err(|error| job_error(&error))
    }

    fn room(&self, plan: &Arc<Plan>) -> u32 {
        self.session.room(plan) as u32
    }

    fn generate(&self, tasks: Vec<Task<Arc<Plan>>>) {
        let tasks: Vec<EngineTask> = tasks
            .into_iter()
            .map(|task| {
                let sink = Arc::new(Follow::new(&task.plan, task.sink));
                EngineTask { plan: task.plan, sink }
            })
            .collect();
        self.session.generate(&tasks);
    }

    fn finish(&self) {
        self.session.finish();
    }

    fn reset(&self) {
        self.session.reset();
    }
}

/// What the names in a job mean: inputs that the server keeps, and lists of known files.
struct Names<'a> {
    job: &'a JobInputs<'a>,
    models: &'a Models,
    own_vae: Option<&'a Path>,
}

impl Inputs for Names<'_> {
    fn image(&self, name: &Path) -> kiln_engine::Result<InputImage> {
        let image = self.job.image(&FileRef::from(name.to_path_buf()));
        let image = image.map_err(|error| Error::request(error.message))?;
        let file = FileRef { path: image.path, sha256: Some(image.sha256) };
        Ok(InputImage { picture: image.picture, file })
    }

    fn lora(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        let gone = || Error::request(format!("the LoRA `{}` is no longer there", name.display()));
        name.to_str().and_then(|name| self.models.lora(name)).ok_or_else(gone)
    }

    fn vae(&self, name: &Path) -> kiln_engine::Result<PathBuf> {
        if self.own_vae == Some(name) {
            return Ok(name.to_path_buf());
        }
        let gone = || Error::request(format!("the autoencoder `{}` is no longer there", name.display()));
        name.to_str().and_then(|name| self.models.vae(name)).ok_or_else(gone)
    }

    fn tensors(&self, _: &Path) -> kiln_engine::Result<PathBuf> {
        Err(Error::request("files of tensors are not taken over HTTP"))
    }
}

/// Takes what the engine reports to the server.
struct Follow {
    sink: Arc<dyn JobSink>,
    tracker: Mutex<Tracker>,
    /// Why a finished image was not taken.
    rejected: Mutex<Option<JobError>>,
}

impl Follow {
    fn new(plan: &Plan, sink: Arc<dyn JobSink>) -> Follow {
        Follow { sink, tracker: Mutex::new(Tracker::new(plan)), rejected: Mutex::new(None) }
    }

    fn rejected(&self) -> MutexGuard<'_, Option<JobError>> {
        lock(&self.rejected)
    }
}

impl Sink for Follow {
    fn cancelled(&self) -> bool {
        self.sink.cancelled()
    }

    fn event(&self, event: &Event) {
        match event {
            Event::Note(text) | Event::Lora { report: text } => self.sink.note(text),
            Event::StepStarted { step: 0, own, all, .. } => self.sink.batch(*own as u32, *all as u32),
            _ => {}
        }
        let progress = lock(&self.tracker).after(event);
        if let Some(progress) = progress {
            self.sink.progress(progress);
        }
    }

    fn wants_preview(&self) -> bool {
        self.sink.wants_preview()
    }

    fn preview(&self, picture: Picture) {
        self.sink.preview(picture);
    }

    fn image(&self, image: Image) -> kiln_engine::Result<()> {
        let Image { index, picture, seed, recipe, .. } = image;
        let finished = Finished { index: index as u32, picture, seed, recipe: recipe.to_json() };
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

/// An engine's error as the server's clients see it.
fn job_error(error: &Error) -> JobError {
    use kiln_weights::Error as Weights;
    if error.is_cancelled() {
        return JobError::cancelled();
    }
    let message = error.to_string();
    match error.root() {
        _ if error.is_requests_fault() => JobError::request("invalid_request", message),
        Error::Model(kiln_model::Error::Weights(Weights::Lora { .. } | Weights::LoraUnmatched { .. })) => {
            JobError::request("lora_unfit", message)
        }
        Error::Model(kiln_model::Error::Ops(kiln_ops::Error::Memory { .. })) => {
            JobError::server("out_of_memory", message)
        }
        Error::Model(kiln_model::Error::NotFinite { .. }) => JobError::server("not_finite", message),
        Error::Panicked(_) => JobError::server("panicked", message),
        Error::MissingPart { .. } | Error::Mismatch { .. } | Error::Device { .. } | Error::Load(_) => {
            tracing::error!("{message}");
            JobError::server("model_failed", message)
        }
        _ => {
            tracing::error!("{message}");
            JobError::server("generation_failed", message)
        }
    }
}

/// Logs what happens while a model is loaded before there is any job.
struct Log;

impl Sink for Log {
    fn event(&self, event: &Event) {
        if let Event::Note(text) = event {
            tracing::info!("{text}");
        }
    }

    fn image(&self, _: Image) -> kiln_engine::Result<()> {
        Ok(())
    }

    fn ended(&self, _: kiln_engine::Result<()>) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_server::Blame;

    #[test]
    fn a_fault_of_the_request_is_told_from_one_of_the_server() {
        assert_eq!(job_error(&Error::request("too wide")).blame, Blame::Request);
        let nan = Error::Model(kiln_model::Error::NotFinite { what: "it" });
        assert_eq!(job_error(&nan).blame, Blame::Server);
        assert_eq!(job_error(&Error::CANCELLED).blame, Blame::Cancelled);
        let missing = kiln_weights::Error::NotFound { path: "a".into() };
        assert_eq!(job_error(&missing.into()).blame, Blame::Server);
    }
}

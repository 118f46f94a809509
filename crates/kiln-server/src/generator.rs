//! What the server needs of the program around it: a list of models, and a generator that makes images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{FileRef, Progress, Request};
use kiln_image::Picture;
use serde::Serialize;
use utoipa::ToSchema;

use crate::Server;

/// A model that can be asked for.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ModelInfo {
    /// Its name.
    pub name: String,
    /// Whether it is used when none is named.
    pub default: bool,
    /// Sides of an image when none are asked for.
    pub size: u32,
    /// The sides it was trained on, where that is not everything: smallest and largest.
    pub sides: Option<(u32, u32)>,
    /// Steps when none are asked for.
    pub steps: u32,
    /// Guidance when none is asked for; absent on models without.
    pub guidance: Option<f32>,
    /// Whether a negative prompt has an effect.
    pub negative: bool,
}

/// What can be asked for. Answers while images are generated.
pub trait Catalogue: Send + Sync {
    /// Every model.
    fn models(&self) -> Vec<ModelInfo>;

    /// The names of all LoRAs.
    fn loras(&self) -> Vec<String>;

    /// The names of all autoencoders that can replace a model's own.
    fn vaes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Makes the images of jobs. Methods are called from different threads, at the same time.
pub trait Generator: Send + Sync + 'static {
    /// A job understood. Cheap to clone: an `Arc`.
    type Plan: Clone + Send + Sync + 'static;

    /// Gets ready for jobs that name no model, so that the first one doesn't wait.
    fn warm_up(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// Understands a job: reads its images, checks it against its model. Runs ahead, while earlier jobs are generated.
    fn plan(&self, job: &JobInputs<'_>) -> Result<Self::Plan, JobError>;

    /// How many images like this plan's are made at once; 1 is one after the other.
    fn room(&self, plan: &Self::Plan) -> u32 {
        let _ = plan;
        1
    }

    /// Generates these jobs; there are several where there was [`room`](Generator::room). Returns as soon as the next
    /// call may come. Images and ends arrive at each job's sink, perhaps later and from other threads; a task that is
    /// dropped without an end has failed. An error of one job doesn't concern the others.
    fn generate(&self, tasks: Vec<Task<Self::Plan>>);

    /// Waits until everything handed to [`generate`](Generator::generate) has ended.
    fn finish(&self);

    /// Drops what may be inconsistent after a panic in [`generate`](Generator::generate). Nothing of that call is
    /// waited for any more; earlier calls still end.
    fn reset(&self) {}
}

/// A job to generate, and where its images go.
pub struct Task<P> {
    /// The job.
    pub plan: P,
    /// Receives its images, its progress and its end.
    pub sink: Arc<dyn JobSink>,
}

/// Receives what becomes of a job. Methods may be called from any thread; none but [`image`](JobSink::image) and
/// [`ended`](JobSink::ended) waits for a disk.
pub trait JobSink: Send + Sync {
    /// Whether the job is to stop: cancelled, or too slow. To be asked at least once a step.
    fn cancelled(&self) -> bool;

    /// Reports progress.
    fn progress(&self, progress: Progress);

    /// The steps of `own` images of this job begin, of `all` that are generated at once.
    fn batch(&self, own: u32, all: u32) {
        let _ = (own, all);
    }

    /// Something the client should know.
    fn note(&self, text: &str);

    /// Whether somebody looks at previews.
    fn wants_preview(&self) -> bool;

    /// What the image looks like so far.
    fn preview(&self, picture: Picture);

    /// Encodes and saves a finished image. A job's images come one after the other.
    fn image(&self, image: Finished) -> Result<(), JobError>;

    /// The job is done, or there will be no more of it. Only the first call counts.
    fn ended(&self, result: Result<(), JobError>);
}

/// A finished image.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Its number in the job, from 0.
    pub index: u32,
    /// The image.
    pub picture: Picture,
    /// Its seed, where it has one.
    pub seed: Option<u64>,
    /// How it was made, as JSON.
    pub recipe: String,
}

/// A job to be planned: its request, and the images it names.
pub struct JobInputs<'a> {
    pub(crate) server: &'a Server,
    pub(crate) request: &'a Request,
}

/// An image that a job names.
#[derive(Clone, Debug)]
pub struct InputImage {
    /// The image, decoded.
    pub picture: Arc<Picture>,
    /// Its file.
    pub path: PathBuf,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
}

impl JobInputs<'_> {
    /// What is asked for. Its images are named as [`image`](JobInputs::image) takes them; model, LoRAs and autoencoder as
    /// the [`Catalogue`] lists them.
    pub fn request(&self) -> &Request {
        self.request
    }

    /// An image that the request names. One that came with the request was decoded then and is not decoded again.
    pub fn image(&self, file: &FileRef) -> Result<InputImage, JobError> {
        self.server.input_image(name(&file.path))
    }
}

/// A name in a request. It came as text, so it is text.
pub(crate) fn name(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// Who caused an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The request can't be fulfilled as it is.
    Request,
    /// Something that is not the client's fault.
    Server,
    /// It was cancelled.
    Cancelled,
}

/// Why a job has no images.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct JobError {
    /// Who caused it.
    pub blame: Blame,
    /// A stable word for programs, such as `out_of_memory`.
    pub code: &'static str,
    /// A sentence for people.
    pub message: String,
}

impl JobError {
    /// A request that can't be fulfilled as it is.
    pub fn request(code: &'static str, message: impl Into<String>) -> JobError {
        JobError { blame: Blame::Request, code, message: message.into() }
    }

    /// A failure that is not the client's fault.
    pub fn server(code: &'static str, message: impl Into<String>) -> JobError {
        JobError { blame: Blame::Server, code, message: message.into() }
    }

    /// The job was cancelled.
    pub fn cancelled() -> JobError {
        JobError { blame: Blame::Cancelled, code: "cancelled", message: "cancelled".into() }
    }
}

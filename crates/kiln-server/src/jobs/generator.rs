//! The traits that the program around the server implements: a catalogue of models and a generator of images.

use crate::jobs::error::{ErrorCode, JobError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{FileRef, Progress, Request, StepCounts};
use kiln_image::RgbImage;
use serde::{Deserialize, Serialize};

/// A model that requests can name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ModelInfo {
    /// Its name.
    pub name: String,
    /// Whether it is used when a request names no model.
    pub default: bool,
    /// Default width and height.
    pub size: u32,
    /// Widths and heights are multiples of it.
    #[serde(default = "earlier_unit")]
    pub unit: u32,
    /// The smallest and largest side it was trained on, if limited.
    #[cfg_attr(feature = "schema", schema(value_type = Option<Vec<u32>>, min_items = 2, max_items = 2))]
    pub sides: Option<(u32, u32)>,
    /// Default number of steps.
    pub steps: u32,
    /// Default guidance; absent for models without guidance.
    pub guidance: Option<f32>,
    /// Whether it supports a negative prompt.
    pub negative: bool,
    /// Whether `POST /v1/prompts/upsample` can rewrite its prompts.
    pub rewrites: bool,
}

/// The unit of models of workers that don't tell it: those of an earlier version, which had FLUX.2 alone.
fn earlier_unit() -> u32 {
    16
}

/// A LoRA that requests can name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoraInfo {
    /// Its name; in a subfolder with the folder's name and a slash before it.
    pub name: String,
    /// Words that it was trained with and that belong into a prompt.
    pub triggers: Vec<String>,
    /// Whether there is an image that shows what it does.
    pub has_preview: bool,
}

/// A model that can be downloaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DownloadableModel {
    /// Its name.
    pub name: String,
    /// Where it comes from.
    pub source: String,
    /// Whether it is on this machine already.
    pub installed: bool,
    /// The licence that must be accepted before a download.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub licence: Option<DownloadLicence>,
}

/// A licence with conditions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DownloadLicence {
    /// Its name.
    pub name: String,
    /// Where to read it.
    pub url: String,
}

/// The models, LoRAs and VAEs that requests can name. Called while images are generated, from any thread.
pub trait Catalogue: Send + Sync {
    /// All models.
    fn models(&self) -> Vec<ModelInfo>;

    /// The name of the model that is used when a request names none.
    fn default_model(&self) -> Option<String> {
        self.models().into_iter().find(|model| model.default).map(|model| model.name)
    }

    /// The model of a request, which is the default one if it names none.
    fn model_of(&self, request: &Request) -> Option<ModelInfo> {
        let named = request.model.as_deref().map(name);
        self.models().into_iter().find(|model| named.map_or(model.default, |name| model.name == name))
    }

    /// The unit of the sizes that a request's model generates.
    fn unit(&self, request: &Request) -> u32 {
        self.model_of(request).map_or(1, |model| model.unit)
    }

    /// The names of all LoRAs.
    fn loras(&self) -> Vec<String>;

    /// The names of all VAEs that can replace a model's own.
    fn vaes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The fingerprint of a model's weights, which tells models of the same name apart.
    fn model_hash(&self, name: &str) -> Option<String> {
        let _ = name;
        None
    }

    /// The models that can't be used, each with the reason; [`models`](Catalogue::models) leaves them out.
    fn unusable_models(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Looks for new and removed models now, not only after a while.
    fn refresh(&self) {}

    /// All LoRAs with what is known about them.
    fn lora_details(&self) -> Vec<LoraInfo> {
        self.loras().into_iter().map(|name| LoraInfo { name, ..LoraInfo::default() }).collect()
    }

    /// An image file that shows what a LoRA does.
    fn lora_preview(&self, name: &str) -> Option<Vec<u8>> {
        let _ = name;
        None
    }

    /// The file of a LoRA, where it is on this machine.
    fn lora_file(&self, name: &str) -> Option<PathBuf> {
        let _ = name;
        None
    }

    /// The models that [`download`](Catalogue::download) accepts; none where downloads are not allowed.
    fn downloadable(&self) -> Vec<DownloadableModel> {
        Vec::new()
    }

    /// Downloads a model. `on_progress` gets the bytes present and the total, and cancels by returning false; what was
    /// downloaded by then is kept.
    fn download(&self, name: &str, on_progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<(), JobError> {
        let _ = on_progress;
        Err(JobError::new(ErrorCode::ModelNotFound, format!("the model `{name}` can't be downloaded")))
    }

    /// Rewrites the prompt of a request to a more detailed one. Takes long, and stops when `cancelled` returns true; one
    /// that can't wait is refused as `busy`.
    fn rewrite_prompt(
        &self,
        job: &JobInputs<'_>,
        temperature: f32,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<String, JobError> {
        let _ = (job, temperature, cancelled);
        Err(JobError::new(ErrorCode::NotAvailable, "this server does not rewrite prompts"))
    }
}

/// A model that is in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadedModel {
    /// Its name.
    pub name: String,
    /// The device: `cpu`, `cuda:0`.
    pub device: String,
    /// The backend: `cpu (avx512)`.
    pub backend: String,
    /// The precision: `bf16`.
    pub dtype: String,
    /// How long loading it took.
    pub load_seconds: f64,
    /// Bytes that its device has left, if known.
    pub free_memory: Option<u64>,
}

/// Generates the images of jobs. Methods are called concurrently from several threads.
pub trait Generator: Send + Sync + 'static {
    /// A planned job. Cheap to clone, such as an `Arc`.
    type Plan: Clone + Send + Sync + 'static;

    /// Loads the default model, so that the first job doesn't wait for it.
    fn warm_up(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// The models that are in memory, for metrics. Must not wait for jobs.
    fn loaded(&self) -> Vec<LoadedModel> {
        Vec::new()
    }

    /// Plans a job: reads its images and checks it against its model. Called while earlier jobs are generated.
    fn plan(&self, job: &JobInputs<'_>) -> Result<Self::Plan, JobError>;

    /// The largest batch, in images, for plans like this one; 1 disables batching.
    fn batch_capacity(&self, plan: &Self::Plan) -> u32 {
        let _ = plan;
        1
    }

    /// Generates these jobs, several only within [`batch_capacity`](Generator::batch_capacity). Returns as soon as it
    /// can be called again. Images and results go to each job's sink, possibly later and from other threads; a sink that
    /// is dropped before [`ended`](JobSink::ended) fails its job. An error of one job must not affect the others.
    fn generate(&self, tasks: Vec<Task<Self::Plan>>);

    /// Waits until everything handed to [`generate`](Generator::generate) has ended.
    fn finish(&self);

    /// Drops state that may be inconsistent after a panic in [`generate`](Generator::generate). The jobs of that call
    /// are abandoned; those of earlier calls still end.
    fn reset(&self) {}
}

/// A planned job and the sink for its images.
pub struct Task<P> {
    /// The planned job.
    pub plan: P,
    /// Receives its progress, images and result.
    pub sink: Arc<dyn JobSink>,
}

/// Receives the progress, images and result of a job. Methods may be called from any thread; only
/// [`image`](JobSink::image) and [`ended`](JobSink::ended) wait for the disk.
pub trait JobSink: Send + Sync {
    /// Whether to stop the job because it was cancelled or timed out. Check at least once per step.
    fn cancelled(&self) -> bool;

    /// Reports progress.
    fn progress(&self, progress: Progress);

    /// Reports that a batch of `all` images starts, `own` of them from this job.
    fn batch(&self, own: u32, all: u32) {
        let _ = (own, all);
    }

    /// Adds a message for the client.
    fn note(&self, text: &str);

    /// Whether a client wants previews.
    fn wants_preview(&self) -> bool;

    /// Reports an intermediate image.
    fn preview(&self, image: RgbImage);

    /// Encodes and saves a finished image. Calls for one job must not overlap.
    fn image(&self, image: FinishedImage) -> Result<(), JobError>;

    /// Ends the job. Only the first call counts.
    fn ended(&self, result: Result<(), JobError>);
}

/// A finished image.
#[derive(Clone, Debug)]
pub struct FinishedImage {
    /// Its number in the job, from 0.
    pub index: u32,
    /// The pixels.
    pub image: RgbImage,
    /// Its seed, if it has one.
    pub seed: Option<u64>,
    /// Steps computed, and steps that reused the step cache.
    pub steps: StepCounts,
    /// Its recipe: every setting it was generated with, as JSON.
    pub recipe: String,
}

/// A job to plan: its request and access to its input images.
pub struct JobInputs<'a> {
    pub(crate) request: &'a Request,
    pub(crate) source: &'a dyn InputSource,
}

/// Where the input images of jobs are, and how large images may be.
pub(crate) trait InputSource: Sync {
    /// An input image, decoded.
    fn input_image(&self, name: &str) -> Result<InputImage, JobError>;

    /// Checks the size of an image to generate.
    fn check_size(&self, width: u32, height: u32) -> Result<(), JobError>;
}

/// An input image of a job.
#[derive(Clone, Debug)]
pub struct InputImage {
    /// The decoded image.
    pub image: Arc<RgbImage>,
    /// Its file.
    pub path: PathBuf,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
}

impl JobInputs<'_> {
    /// The request. Its images have names for [`image`](JobInputs::image); model, LoRAs and VAE have the names that the
    /// [`Catalogue`] lists.
    pub fn request(&self) -> &Request {
        self.request
    }

    /// Checks the size that a plan arrived at against the server's limits. A request that leaves sides out takes them from
    /// its model or its images.
    pub fn check_size(&self, width: u32, height: u32) -> Result<(), JobError> {
        self.source.check_size(width, height)
    }

    /// Returns an image that the request names. An image decoded when the request arrived is not decoded again.
    pub fn image(&self, file: &FileRef) -> Result<InputImage, JobError> {
        self.source.input_image(name(&file.path))
    }
}

/// A name in a request as text. Names come from JSON, so they are valid UTF-8.
pub(crate) fn name(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

//! The engine: a model loaded on a device, which generates the images of plans.

use std::sync::Arc;

use kiln_image::RgbImage;
use kiln_tensor::{DType, HostTensor};
use kiln_weights::LoraReport;

use crate::counters::Counters;
use crate::error::Result;
use crate::model::{Model, VaeFile};
use crate::pipeline::BatchLimit;
use crate::plan::{Plan, PlannedLora};
use crate::shared_device::SharedDevice;
use crate::sink::Sink;

/// The device and precision of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineInfo {
    /// The device, as `--device` takes it: `cpu`, `cuda:0`.
    pub device: String,
    /// The backend's name for messages and recipes: `cpu (avx512)`.
    pub backend: String,
    /// The precision: `f32`, `bf16`, `int8` or `fp8`.
    pub dtype: &'static str,
}

/// A plan to generate, and the sink for its images.
#[derive(Clone)]
pub struct Task {
    /// What to generate.
    pub plan: Arc<Plan>,
    /// Receives events and images.
    pub sink: Arc<dyn Sink>,
}

/// A model loaded on a device.
///
/// [`Engine::generate`] returns when all its work is queued on the device, so that the next call keeps the device busy
/// while a second thread waits for the images and passes them to their [`Sink`]s.
pub trait Engine: Send + Sync {
    /// Returns the device and precision.
    fn info(&self) -> &EngineInfo;

    /// Returns the loaded model.
    fn model(&self) -> &Arc<Model>;

    /// Returns the dtype of activations.
    fn dtype(&self) -> DType;

    /// Replaces the LoRAs, after waiting for unfinished tasks. Returns a report for each, or `None` if they are the
    /// current ones. After an error the LoRAs are unchanged.
    fn set_loras(&mut self, loras: &[PlannedLora], partial: bool) -> Result<Option<Vec<LoraReport>>>;

    /// Shares its device, and the transformer's weights if all of them are on the device.
    fn share(&self) -> Result<SharedDevice>;

    /// Returns the bytes available for activations; `None` if unknown.
    fn free_memory(&self) -> Option<u64>;

    /// Returns how many images of a plan like this one run in one batch, at most `max_images`.
    fn batch_capacity(&self, plan: &Plan, max_images: usize) -> usize;

    /// Loads what this plan needs and is not loaded yet, which reports damaged files early.
    fn prepare(&self, plan: &Plan, sink: &dyn Sink) -> Result<()>;

    /// Generates the images of these tasks, batched as far as they are alike and `limit` allows. Returns when all work
    /// is queued on the device; the sinks get images and results from another thread.
    fn generate(&self, tasks: &[Task], limit: &BatchLimit);

    /// Encodes the prompts of a plan, then its negative prompts if it has guidance: f32 `[tokens, dim]` each. There are none
    /// for embeddings.
    fn encode_prompts(&self, plan: &Plan, sink: &dyn Sink) -> Result<Vec<HostTensor>>;

    /// Encodes an image, whose sides must be multiples of 16, with this VAE or the model's to normalized latents as tokens,
    /// f32 `[height/16 · width/16, channels]`.
    fn encode_image(
        &self,
        image: &RgbImage,
        vae: Option<&Arc<VaeFile>>,
        sink: &dyn Sink,
    ) -> Result<HostTensor>;

    /// Decodes normalized latents, the tokens of a `grid` of height and width, with this VAE or the model's.
    fn decode_latents(
        &self,
        latents: &HostTensor,
        grid: [usize; 2],
        vae: Option<&Arc<VaeFile>>,
        sink: &dyn Sink,
    ) -> Result<RgbImage>;

    /// Converts normalized latents, the tokens of a `grid` of height and width, to the VAE's own, f32
    /// `[height/8, width/8, channels/4]`.
    fn unpack_latents(
        &self,
        latents: &HostTensor,
        grid: [usize; 2],
        vae: Option<&Arc<VaeFile>>,
    ) -> Result<HostTensor>;

    /// Waits until every task so far has ended.
    fn finish(&self);

    /// Returns counters for benchmarks.
    fn counters(&self) -> Counters;
}

//! The engine: a model loaded on a device, which generates the images of plans.

use std::sync::Arc;

use kiln_tensor::DType;
use kiln_weights::LoraReport;

use crate::error::Result;
use crate::model::Model;
use crate::pipeline::BatchLimit;
use crate::plan::{Plan, PlannedLora};
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

    /// Returns the bytes available for activations; `None` if unknown.
    fn free_memory(&self) -> Option<u64>;

    /// Returns how many images of a plan like this one run in one batch, at most `max_images`.
    fn batch_capacity(&self, plan: &Plan, max_images: usize) -> usize;

    /// Loads what this plan needs and is not loaded yet, which reports damaged files early.
    fn prepare(&self, plan: &Plan, sink: &dyn Sink) -> Result<()>;

    /// Generates the images of these tasks, batched as far as they are alike and `limit` allows. Returns when all work
    /// is queued on the device; the sinks get images and results from another thread.
    fn generate(&self, tasks: &[Task], limit: &BatchLimit);

    /// Waits until every task so far has ended.
    fn finish(&self);

    /// Returns counters for benchmarks.
    fn counters(&self) -> Counters;
}

/// Counters of an engine since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Transformer calls that replayed a CUDA graph.
    pub graph_replays: usize,
    /// Peak device memory in bytes; 0 on the CPU.
    pub peak_memory: u64,
}

//! The engine: a loaded model on some device that makes the images of plans.

use std::sync::Arc;

use kiln_tensor::DType;
use kiln_weights::LoraReport;

use crate::error::Result;
use crate::model::Model;
use crate::pipeline::BatchLimit;
use crate::plan::{Plan, PlannedLora};
use crate::sink::Sink;

/// What computes, and in what.
#[derive(Clone, Debug, PartialEq)]
pub struct About {
    /// The device, as `--device` takes it: `cpu`, `cuda:0`.
    pub device: String,
    /// Its name for messages and recipes: `cpu (avx512)`.
    pub backend: String,
    /// What is computed in: `f32`, `bf16`, `int8` or `fp8`.
    pub dtype: &'static str,
}

/// A plan to be carried out, and where its images go.
#[derive(Clone)]
pub struct Task {
    /// What to generate.
    pub plan: Arc<Plan>,
    /// Where images and news go.
    pub sink: Arc<dyn Sink>,
}

/// A loaded model on some device.
///
/// [`Engine::generate`] returns when the work of its images is on the device, so that the next call keeps the device busy
/// while the images before it are turned into bytes and saved by their [`Sink`]s on another thread.
pub trait Engine: Send + Sync {
    /// What computes.
    fn about(&self) -> &About;

    /// The model that is loaded.
    fn model(&self) -> &Arc<Model>;

    /// What activations are computed in.
    fn dtype(&self) -> DType;

    /// Uses these LoRAs instead of those it has, after waiting for the work under way; `None` where they are the ones it
    /// has. After an error it has those from before.
    fn set_loras(&mut self, loras: &[PlannedLora], partial: bool) -> Result<Option<Vec<LoraReport>>>;

    /// Bytes that the activations of one call may take now; `None` where nobody knows.
    fn free_memory(&self) -> Option<u64>;

    /// How many images of a plan like this one are made at once, at most `images`.
    fn room(&self, plan: &Plan, images: usize) -> usize;

    /// Loads what this plan needs and is not loaded yet, which finds damaged files early.
    fn prepare(&self, plan: &Plan, sink: &dyn Sink) -> Result<()>;

    /// Makes the images of these plans, together as far as they are alike and `limit` allows. Returns when the work of all is
    /// on the device; images and ends come to the sinks from another thread.
    fn generate(&self, tasks: &[Task], limit: &BatchLimit);

    /// Waits until every task so far has ended.
    fn finish(&self);

    /// Calls of the transformer that were replayed so far, and the most bytes of the device's memory that were in use; for
    /// measurements.
    fn counters(&self) -> Counters;
}

/// What an engine counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of the transformer that were replayed recordings.
    pub replayed: usize,
    /// The most bytes of the device's memory that were in use; 0 on the CPU.
    pub peak_memory: u64,
}

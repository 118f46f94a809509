//! What a trainer gets, and what it tells of it.

use std::path::Path;

use kiln_train::TrainRequest;
use serde::{Deserialize, Serialize};

/// A training to run.
#[derive(Clone, Copy, Debug)]
pub struct TrainingTask<'a> {
    /// Its settings, complete. Its model and its LoRA are named, as clients name them.
    pub request: &'a TrainRequest,
    /// The folder of its images, each with its caption in a .txt file beside it.
    pub images: &'a Path,
    /// The folder for everything that it writes.
    pub folder: &'a Path,
}

/// What is known before a training starts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TrainingCheck {
    /// Images in one pass over the data.
    pub examples: usize,
    /// Their sizes: `768x768 (12)`.
    pub sizes: Vec<String>,
    /// What the user should know: duplicates, images that are left out.
    pub warnings: Vec<String>,
    /// Parameters and memory, in words.
    pub cost: String,
}

/// A step of a training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingStep {
    /// Its number, from 1.
    pub step: u64,
    /// Its loss.
    pub loss: f32,
    /// The smoothed loss.
    pub smoothed: f32,
    /// Seconds of a step: the mean of the last ones.
    pub seconds: f32,
}

/// A point of the loss curve: the step, its loss and the smoothed loss.
pub type LossPoint = (u64, f32, f32);

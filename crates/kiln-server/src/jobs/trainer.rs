//! What the program around the server implements to train LoRAs.

use crate::jobs::error::JobError;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln_train::TrainRequest;
use serde::Serialize;

use crate::jobs::trainings::{LossPoint, TrainingCheck, TrainingProgress, TrainingTask};

/// A model that LoRAs can be trained on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TrainableModel {
    /// Its name.
    pub name: String,
    /// The distilled model to use the LoRA with, if the server has it.
    pub use_with: Option<String>,
    /// The settings of the presets: fields of a training's `request`.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<Object>))]
    pub presets: Vec<TrainRequest>,
}

/// What a training has written so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainingFiles {
    /// The losses of all steps.
    pub losses: Vec<LossPoint>,
    /// The sample images, by step.
    pub samples: Vec<(u64, PathBuf)>,
    /// Whether there is a checkpoint to continue from.
    pub resumable: bool,
}

/// How a training ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrainingEnd {
    /// The LoRA is there, under this name.
    Done(String),
    /// It was told to stop, or image jobs want the device; a checkpoint is saved.
    Stopped,
}

/// Trains LoRAs, one at a time. Called from any thread.
pub trait Trainer: Send + Sync + 'static {
    /// The models that LoRAs can be trained on.
    fn models(&self) -> Vec<TrainableModel>;

    /// A distilled model that a client wants to train anyway, although that usually spoils it.
    fn distilled_model(&self, name: &str) -> Option<TrainableModel> {
        let _ = name;
        None
    }

    /// Checks the images and settings of a training, and estimates what it costs. Loads nothing.
    fn check(&self, task: TrainingTask<'_>) -> Result<TrainingCheck, JobError>;

    /// Runs a training to its end, or until [`TrainingProgress::is_stopped`]; continues from the checkpoint if there is one.
    ///
    /// Between steps it makes way for image jobs: it waits in [`TrainingProgress::wait_for_device`], or if a job does not fit
    /// into memory beside it, it saves and returns [`TrainingEnd::Stopped`], and is called again when the device is free.
    fn train(&self, task: TrainingTask<'_>, progress: &TrainingProgress) -> Result<TrainingEnd, JobError>;

    /// How long the device must be free before a training that released it is run again.
    fn idle_time(&self) -> Duration {
        Duration::from_secs(3)
    }

    /// Reads what a training has written to its folder.
    fn files(&self, folder: &Path) -> TrainingFiles;

    /// Deletes what a finished training no longer needs: checkpoints and encoded images.
    fn clean_up(&self, folder: &Path) {
        let _ = folder;
    }

    /// Deletes the file of a LoRA that [`train`](Trainer::train) has written. Returns false if it is gone.
    fn delete_lora(&self, name: &str) -> std::io::Result<bool> {
        let _ = name;
        Ok(false)
    }
}

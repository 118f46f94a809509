//! What the program around the server implements to train LoRAs, and the order of a training.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::generator::JobError;
pub use crate::trainings::TrainingProgress;

/// What a LoRA should learn: chooses layers, rank, sizes and steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// How pictures look: few layers, which leave the subjects alone.
    Style,
    /// A person, an animal or an object: all layers, a high rank, two sizes.
    Subject,
    /// All layers, with the defaults of `kiln train`.
    #[default]
    Full,
}

/// The settings of a training. What is left out comes from the preset and the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TrainingOrder {
    /// The name of the LoRA: letters, digits, spaces, `.`, `-` and `_`. If it is taken, a number is added.
    #[cfg_attr(feature = "schema", schema(required = true))]
    pub name: String,
    /// The base model; the first one of `/v1/trainings/options` by default.
    pub model: Option<String>,
    /// A word or phrase that stands for what is learned: takes the place of `[trigger]` in captions, else goes in front.
    pub trigger: Option<String>,
    /// What to learn.
    pub preset: Preset,
    /// Optimizer steps.
    pub steps: Option<u64>,
    /// Rank of the LoRA.
    pub rank: Option<u32>,
    /// Layers: `full`, `style`, `identity`, or names separated by commas.
    pub targets: Option<String>,
    /// Sizes in pixels, as the side of a square.
    pub resolution: Vec<u32>,
    /// Learning rate.
    pub learning_rate: Option<f32>,
    /// Whether the learning rate falls to zero at the last step.
    pub cosine: Option<bool>,
    /// `adamw`, `adamw8bit` or `prodigy`.
    pub optimizer: Option<String>,
    /// Noise levels above 0 and at most 1; by default drawn as FLUX was trained.
    pub sigmas: Vec<f32>,
    /// Examples of a batch.
    pub batch: Option<u32>,
    /// Whether half of the examples are mirrored.
    pub flip: bool,
    /// Seed of the training.
    pub seed: Option<u64>,
    /// Steps between checkpoints.
    pub save_every: Option<u64>,
    /// Steps between sample images; 0 for none.
    pub sample_every: Option<u64>,
    /// Prompts of the sample images; by default the first captions.
    pub sample_prompts: Vec<String>,
    /// Train on pictures without captions.
    pub no_captions: bool,
    /// Leave out broken and tiny pictures instead of refusing to start.
    pub skip_bad: bool,
}

/// The settings that a preset means for a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PresetSettings {
    /// The preset.
    pub preset: Preset,
    /// Optimizer steps.
    pub steps: u64,
    /// Rank.
    pub rank: u32,
    /// Layers.
    pub targets: String,
    /// Sizes in pixels.
    pub resolution: Vec<u32>,
    /// Learning rate.
    pub learning_rate: f32,
}

/// A model that LoRAs can be trained on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TrainableModel {
    /// Its name.
    pub name: String,
    /// The distilled model to use the LoRA with, if the server has it.
    pub use_with: Option<String>,
    /// The settings of the presets.
    pub presets: Vec<PresetSettings>,
}

/// What is known before a training starts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TrainingCheck {
    /// Pictures in one pass over the data.
    pub examples: usize,
    /// Their sizes: `768x768 (12)`.
    pub sizes: Vec<String>,
    /// What the user should know: duplicates, pictures that are left out.
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

/// A training to run.
#[derive(Clone, Copy, Debug)]
pub struct TrainingTask<'a> {
    /// Its settings.
    pub order: &'a TrainingOrder,
    /// The folder of its pictures, each with its caption in a .txt file beside it.
    pub pictures: &'a Path,
    /// The folder for everything that it writes.
    pub folder: &'a Path,
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

    /// Checks the pictures and settings of a training, and estimates what it costs. Loads nothing.
    fn check(&self, task: TrainingTask<'_>) -> Result<TrainingCheck, JobError>;

    /// Runs a training to its end, or until [`TrainingProgress::is_stopped`]; continues from the checkpoint if there is one.
    ///
    /// Between steps it makes way for image jobs: it waits in [`TrainingProgress::wait_for_device`], or if both don't fit
    /// into memory it saves and returns [`TrainingEnd::Stopped`], and is called again when the device is free.
    fn train(&self, task: TrainingTask<'_>, progress: &TrainingProgress) -> Result<TrainingEnd, JobError>;

    /// How long the device must be free before a training that released it is run again.
    fn idle_time(&self) -> Duration {
        Duration::from_secs(3)
    }

    /// Reads what a training has written to its folder.
    fn files(&self, folder: &Path) -> TrainingFiles;

    /// Deletes what a finished training no longer needs: checkpoints and encoded pictures.
    fn clean_up(&self, folder: &Path) {
        let _ = folder;
    }

    /// Deletes the file of a LoRA that [`train`](Trainer::train) has written. Returns false if it is gone.
    fn delete_lora(&self, name: &str) -> std::io::Result<bool> {
        let _ = name;
        Ok(false)
    }
}

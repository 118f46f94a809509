//! Trains LoRAs: what `kiln train` does, without the command line.
//!
//! ```text
//! Example (latents, text, references) ──noise at sigma──▶ transformer + adapters ──▶ velocity ──MSE──▶ loss
//!     adapters ◀──optimizer── gradients ◀──blocks, last to first──┘
//! ```
//! A [`Trainer`] owns the frozen transformer, the adapters and the optimizer, and takes one optimizer step over a list of
//! batches. Everything random in a step follows from the seed and the step's number, so that a training that is resumed from
//! its [`TrainerState`] continues bit for bit.
#![forbid(unsafe_code)]

mod adapter;
mod cache;
mod checkpoint;
pub mod dataset;
mod encode;
mod error;
mod estimate;
mod example;
mod guard;
mod job;
mod log;
mod moments8;
mod norms;
mod objective;
mod optimizer;
mod output;
mod prepare;
mod request;
mod run;
mod samples;
mod schedule;
mod settings;
mod state;
mod tensorboard;
mod trainer;

pub use adapter::{TargetLayer, target_layers};
pub use cache::{Cache, Encoded, Key};
pub use checkpoint::{RunRecord, SavedState, load_state, save_state};
pub use encode::{Encoders, EncodingProgress, EncodingStage};
pub use error::{Error, Result};
pub use estimate::CostEstimate;
pub use example::{Example, ReferenceLatents};
pub use job::{JobWatcher, TrainJob, check_variant, with_default_device};
pub use log::{Log, LogLine};
pub use norms::UpdateNorms;
pub use objective::{NoisyExample, PreparedExample};
pub use output::{LoraFormat, RunFiles, RunLock, write_lora};
pub use prepare::{PreparedTraining, distilled_name};
pub use request::{
    Checkpointing, LearningSchedule, LoraLayout, OptimizerName, Preset, SaveDtype, SigmaLevels, TrainRequest,
};
pub use run::{Outcome, RunOptions, Status, Stepper, Watcher, run};
pub use samples::{SamplePrompt, Sampler, sample_sheets};
pub use settings::{
    AdapterKind, AdapterSettings, BasePrecision, LayerGroup, LearningRate, Optimizer, SigmaSampling,
    TargetPreset, Targets, TrainSettings,
};
pub use state::{StepReport, TrainerState};
pub use trainer::Trainer;

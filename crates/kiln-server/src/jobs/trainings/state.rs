//! The state of a training, and the snapshots that its watchers see.

use serde::{Deserialize, Serialize};

/// The state of a training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub(crate) enum TrainingState {
    /// Waits for its turn.
    #[default]
    Queued,
    /// Images and captions are encoded, the model is loaded.
    Preparing,
    /// Takes its steps.
    Running,
    /// The LoRA is there.
    Done,
    /// Ended with an error; may be resumed.
    Failed,
    /// Cancelled; may be resumed.
    Cancelled,
    /// The server was killed meanwhile; may be resumed.
    Interrupted,
}

impl TrainingState {
    pub(crate) fn can_resume(self) -> bool {
        matches!(self, TrainingState::Failed | TrainingState::Cancelled | TrainingState::Interrupted)
    }

    pub(crate) fn is_active(self) -> bool {
        matches!(self, TrainingState::Queued | TrainingState::Preparing | TrainingState::Running)
    }
}

/// The changing part of a training.
#[derive(Clone, Debug, Default)]
pub(crate) struct TrainingSnapshot {
    pub(crate) state: TrainingState,
    /// Whether it makes way for image jobs.
    pub(crate) paused: bool,
    /// What is being encoded: so many of so many.
    pub(crate) preparing: Option<(String, usize, usize)>,
    pub(crate) step: u64,
    /// The smoothed loss.
    pub(crate) loss: Option<f32>,
    /// Seconds of a step.
    pub(crate) seconds: Option<f32>,
    /// What the user should know, besides what the check of the images found.
    pub(crate) notes: Vec<String>,
    /// Counts new samples.
    pub(crate) samples: u32,
    /// Code and message.
    pub(crate) error: Option<(String, String)>,
    /// The name of the LoRA.
    pub(crate) lora: Option<String>,
    pub(crate) finished: Option<i64>,
}

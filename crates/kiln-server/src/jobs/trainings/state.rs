//! A training as it was submitted, and its state in the snapshots that its watchers see.

use kiln_train::TrainRequest;
use serde::{Deserialize, Serialize};

use super::task::TrainingCheck;

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

/// The part of a training that never changes.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct TrainingJob {
    pub(crate) id: String,
    pub(crate) client: String,
    pub(crate) created: i64,
    #[serde(alias = "order")]
    pub(crate) request: TrainRequest,
    #[serde(alias = "pictures")]
    pub(crate) images: usize,
    #[serde(alias = "picture_bytes")]
    pub(crate) image_bytes: u64,
    pub(crate) check: TrainingCheck,
}

/// The changing part of a training. What is skipped is not stored.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TrainingSnapshot {
    pub(crate) state: TrainingState,
    /// Whether it makes way for image jobs.
    #[serde(skip)]
    pub(crate) paused: bool,
    /// What is being encoded: so many of so many.
    #[serde(skip)]
    pub(crate) preparing: Option<(String, usize, usize)>,
    pub(crate) step: u64,
    /// The smoothed loss.
    #[serde(skip)]
    pub(crate) loss: Option<f32>,
    /// Seconds of a step.
    #[serde(skip)]
    pub(crate) seconds: Option<f32>,
    /// What the user should know, besides what the check of the images found.
    pub(crate) notes: Vec<String>,
    /// Counts new samples.
    #[serde(skip)]
    pub(crate) samples: u32,
    /// Code and message.
    pub(crate) error: Option<(String, String)>,
    /// The name of the LoRA.
    pub(crate) lora: Option<String>,
    pub(crate) finished: Option<i64>,
}

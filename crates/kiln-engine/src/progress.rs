//! The progress of a request.

use serde::{Deserialize, Serialize};

/// A phase of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Waiting in the queue.
    #[default]
    Queue,
    /// Loading the model.
    Load,
    /// Encoding the prompt.
    Text,
    /// Encoding reference images.
    Encode,
    /// Denoising.
    Steps,
    /// Decoding the latents.
    Decode,
    /// Writing the file.
    Save,
}

impl Phase {
    /// All phases in order.
    pub const ALL: [Phase; 7] =
        [Phase::Queue, Phase::Load, Phase::Text, Phase::Encode, Phase::Steps, Phase::Decode, Phase::Save];

    /// Returns its name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Queue => "queue",
            Phase::Load => "load",
            Phase::Text => "text",
            Phase::Encode => "encode",
            Phase::Steps => "steps",
            Phase::Decode => "decode",
            Phase::Save => "save",
        }
    }
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Progress {
    /// The current phase.
    pub phase: Phase,
    /// Index of the current image, from 0.
    pub image: u32,
    /// Number of images.
    pub images: u32,
    /// Finished steps of the current image.
    pub step: u32,
    /// Steps of each image.
    pub steps: u32,
    /// Steps so far in which the current image reused the step cache.
    pub reused: u32,
    /// The tile in progress, from 1, of an image that is upscaled; 0 for others.
    pub tile: u32,
    /// Number of tiles of an image that is upscaled; 0 for others.
    pub tiles: u32,
    /// Finished part of the whole request, from 0 to 1.
    pub fraction: f32,
}

/// How many steps of an image were computed in full, and how many reused the step cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps that ran all blocks of the transformer.
    pub computed: usize,
    /// Steps that reused what most blocks added in earlier ones.
    pub reused: usize,
}

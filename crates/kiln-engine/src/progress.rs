//! How far a request is.

use serde::Serialize;

/// A part of the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Waiting for its turn.
    #[default]
    Queue,
    /// The model is loaded.
    Load,
    /// The prompt is encoded.
    Text,
    /// References are encoded.
    Encode,
    /// Steps.
    Steps,
    /// Latents are decoded.
    Decode,
    /// The file is written.
    Save,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Phase; 7] =
        [Phase::Queue, Phase::Load, Phase::Text, Phase::Encode, Phase::Steps, Phase::Decode, Phase::Save];

    /// Its name in logs and metrics.
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

/// How far the work is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Which image, from 0.
    pub picture: u32,
    /// How many images there will be.
    pub pictures: u32,
    /// Steps of this image that are done.
    pub step: u32,
    /// Steps of each image.
    pub steps: u32,
    /// How much of the whole request is done, from 0 to 1.
    pub fraction: f32,
}

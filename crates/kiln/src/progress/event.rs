//! Progress events, as printed by `--json`.

use std::fmt;

use serde::Serialize;

/// An event of a run; its JSON is a line of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ProgressEvent<'a> {
    /// The request is valid and its files are read.
    Started {
        version: &'a str,
        model: String,
        variant: String,
        device: &'a str,
        backend: &'a str,
        dtype: String,
        prompts: Vec<&'a str>,
        seeds: Vec<Option<u64>>,
        /// No seed was given, so one was chosen at random.
        random_seed: bool,
    },
    /// All defaults are filled in.
    Resolved {
        width: usize,
        height: usize,
        images: usize,
        steps: usize,
        first_step: usize,
        sigmas: &'a [f32],
        #[serde(skip_serializing_if = "Option::is_none")]
        cache: Option<f32>,
        guidance: Option<f32>,
    },
    /// A phase begins.
    Phase { phase: Phase },
    /// `done` of `total` units of a phase are done.
    Progress { phase: Phase, done: usize, total: usize, what: &'a str },
    /// A phase has ended.
    PhaseDone { phase: Phase, seconds: f64 },
    /// A tile of an image that is upscaled begins, counted from 1.
    Tile { image: usize, tile: usize, tiles: usize },
    /// A step begins, counted from 0.
    StepStarted {
        image: usize,
        #[serde(rename = "together")]
        batch: usize,
        images: usize,
        step: usize,
        steps: usize,
        sigma: f32,
    },
    /// `step` of `steps` are done.
    Step {
        /// The first image of the batch.
        image: usize,
        /// Images in the batch.
        #[serde(rename = "together")]
        batch: usize,
        images: usize,
        step: usize,
        steps: usize,
        sigma: f32,
        /// Steps so far that reused the step cache.
        #[serde(skip_serializing_if = "is_zero")]
        reused: usize,
        seconds: f64,
    },
    /// A LoRA was applied to the transformer.
    Lora { report: &'a str },
    /// A note to the user.
    Note { text: &'a str },
    /// The image may differ from what the user expects.
    Warning { text: &'a str },
    /// An image was written.
    Image {
        file: String,
        #[serde(rename = "image")]
        index: usize,
        seed: Option<u64>,
        width: u32,
        height: u32,
        /// Steps that ran all blocks, and steps that reused the step cache, if it is on.
        #[serde(skip_serializing_if = "Option::is_none")]
        computed_steps: Option<usize>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reused_steps: Option<usize>,
        seconds: f64,
    },
    /// The check refused an image, which is not written.
    Refused {
        #[serde(rename = "image")]
        index: usize,
        seed: Option<u64>,
        reason: &'a str,
    },
    /// The latents were written.
    Latents { file: String },
    /// The run is complete.
    Done { images: usize, files: &'a [String], seeds: &'a [Option<u64>], seconds: f64 },
    /// The run failed.
    Error { message: &'a str, context: &'a [String], hint: Option<&'a str> },
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// A phase of the run, with a progress bar of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    Load,
    Text,
    Encode,
    Steps,
    Decode,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Load => "load",
            Phase::Text => "text",
            Phase::Encode => "encode",
            Phase::Steps => "steps",
            Phase::Decode => "decode",
        })
    }
}

use std::fmt;

use serde::Serialize;

/// What there is to tell; as JSON, the events of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Report<'a> {
    /// The order is understood and its files are read.
    Started {
        version: &'a str,
        model: String,
        variant: String,
        device: &'a str,
        backend: &'a str,
        dtype: String,
        prompts: Vec<&'a str>,
        seeds: Vec<Option<u64>>,
        /// The seed was not asked for.
        random_seed: bool,
    },
    /// Every default is filled in.
    Resolved {
        width: usize,
        height: usize,
        pictures: usize,
        steps: usize,
        first_step: usize,
        sigmas: &'a [f32],
        guidance: Option<f32>,
    },
    /// A phase begins.
    Phase { phase: Phase },
    /// So much of a phase is done.
    Progress { phase: Phase, done: usize, total: usize, what: &'a str },
    /// A phase is over.
    PhaseDone { phase: Phase, seconds: f64 },
    /// A step begins, counted from 0.
    StepStarted { picture: usize, together: usize, pictures: usize, step: usize, steps: usize, sigma: f32 },
    /// So many steps are done.
    Step {
        picture: usize,
        /// Pictures that took the step at once, this the first.
        together: usize,
        pictures: usize,
        step: usize,
        steps: usize,
        sigma: f32,
        seconds: f64,
    },
    /// A LoRA was laid over the transformer.
    Lora { report: &'a str },
    /// Good to know.
    Note { text: &'a str },
    /// The picture may not be what was wanted.
    Warning { text: &'a str },
    /// A picture was written.
    Picture { file: String, picture: usize, seed: Option<u64>, width: u32, height: u32, seconds: f64 },
    /// Latents were written.
    Latents { file: String },
    /// All is done.
    Done { pictures: usize, files: &'a [String], seeds: &'a [Option<u64>], seconds: f64 },
    /// It went wrong.
    Error { message: &'a str, context: &'a [String], hint: Option<&'a str> },
}

/// A part of the work with a bar of its own.
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

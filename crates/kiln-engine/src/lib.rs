//! Kiln's engine: a model opened once, a request understood once, and images made from it on whichever device there is.
#![forbid(unsafe_code)]

mod progress;
mod request;

pub use progress::{Phase, Progress};
pub use request::{
    BatchPart, FileRef, LoraRef, MAX_TOKENS, OneOrMany, OutputFormat, PngEffort, Request, Rng, ScheduleKind,
};

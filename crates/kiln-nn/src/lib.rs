//! The networks of FLUX.2: tokenizer, text encoder, transformer, autoencoders, the noise schedule, the language model
//! that rewrites prompts, and the networks of the watermark.
//!
//! ```text
//! prompt ──tokenizer──▶ ids ──text_encoder──▶ text tokens ┐
//! seed ──rng──▶ noise tokens ─────────────────────────────┼──transformer, step by step──▶ tokens ──autoencoder──▶ image
//! references ──autoencoder──▶ reference tokens ───────────┘
//! ```
//! Nothing here depends on which [`Backend`](kiln_ops::Backend) it runs on, or on how a weight is stored. `kiln-engine`
//! opens models and runs requests with these components.
#![forbid(unsafe_code)]

mod autoencoder;
pub mod config;
mod error;
mod finite;
pub mod language_model;
mod observer;
mod prefetch;
mod residency;
pub mod schedule;
pub mod taef2;
pub mod text_encoder;
mod tiles;
pub mod tokenizer;
pub mod transformer;
mod upsampler;
pub mod vae;
pub mod vision;
mod watermark;

pub use autoencoder::{Autoencoder, PendingImage};
pub use error::{Error, Result};
pub use finite::are_finite;
pub use observer::{Event, Observer, StepEnd, StepOutput, StepReply};
pub use residency::ResidencyPlan;
pub use tiles::MAX_TILE_PIXELS;
pub use upsampler::{MAX_NEW_TOKENS, Upsampler};
pub use watermark::{
    PATTERN_SIDE, WATERMARK_BITS, WATERMARK_SIDE, WatermarkLogits, WatermarkReader, WatermarkWriter,
};

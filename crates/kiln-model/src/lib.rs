//! FLUX.2 \[klein\]: one prompt's way to pixels.
//!
//! ```text
//! prompt ──tokenizer──▶ ids ──text_encoder──▶ text tokens ┐
//! seed ──rng──▶ noise tokens ─────────────────────────────┼──transformer, step by step──▶ tokens ──autoencoder──▶ picture
//! references ──autoencoder──▶ reference tokens ───────────┘
//! ```
//! The networks and what belongs to them: tokenizer, text encoder, transformer, autoencoders, noise schedule. Nothing here
//! asks which [`Backend`](kiln_ops::Backend) it runs on or how a weight is stored. `kiln-engine` opens models and runs
//! requests with these parts.
#![forbid(unsafe_code)]

mod ahead;
mod autoencoder;
pub mod config;
mod error;
mod observer;
mod residency;
pub mod schedule;
pub mod taef2;
pub mod text_encoder;
mod tiles;
pub mod tokenizer;
pub mod transformer;
pub mod vae;

pub use autoencoder::{Autoencoder, PictureLater};
pub use error::{Error, Result};
pub use observer::{Denoised, Event, Observer};
pub use residency::ResidencyPlan;
pub use tiles::LARGEST_PIXELS;

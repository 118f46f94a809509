//! FLUX.2 \[klein\]: one prompt's way to pixels.
//!
//! ```text
//! prompt ──tokenizer──▶ ids ──text_encoder──▶ text tokens ┐
//! seed ──rng──▶ noise tokens ─────────────────────────────┼──transformer, step by step──▶ tokens ──autoencoder──▶ picture
//! references ──autoencoder──▶ reference tokens ───────────┘
//! ```
//! [`ModelFolder`] reads what a folder holds, [`Pipeline`] loads it onto a [`Backend`](kiln_ops::Backend) and serves
//! [`Request`]s. Nothing here asks which backend it runs on or how a weight is stored.
//!
//! ```no_run
//! use kiln_model::{ModelFolder, Options, Pipeline, Request};
//! use kiln_ops::Reference;
//!
//! let folder = ModelFolder::open("models/klein-4b")?;
//! let pipeline = Pipeline::load(Reference::new(), &folder, &Options::default(), &mut ())?;
//! let pictures = pipeline.generate(&Request::new("a red fox in the snow"), &mut ())?;
//! # Ok::<(), kiln_model::Error>(())
//! ```
#![forbid(unsafe_code)]

mod ahead;
mod autoencoder;
mod error;
mod folder;
mod observer;
mod parts;
mod pipeline;
pub mod schedule;
pub mod taef2;
mod text_cache;
pub mod text_encoder;
mod tiles;
pub mod tokenizer;
pub mod transformer;
pub mod vae;

pub use autoencoder::Autoencoder;
pub use error::{Error, Result};
pub use folder::{ModelFolder, OwnDefaults, Part, TokenizerFiles, Variant};
pub use observer::{Event, Observer};
pub use parts::Parts;
pub use pipeline::{
    Generated, Member, MemoryNeed, Noise, Options, Pipeline, Placement, Prompt, Request, Resolved, Rng, Task,
    Together, WeightBytes,
};
pub use text_cache::TextCache;

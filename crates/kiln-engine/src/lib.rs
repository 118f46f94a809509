//! Kiln's engine: a model opened once, a request understood once, and images made from it on whichever device there is.
//!
//! ```text
//! Request ─┐
//! Model ───┴─Plan::new──▶ Plan ─┐
//! Settings ──Setup::new──▶ Setup ─load──▶ Engine ─generate──▶ Sink: events, previews, images
//! ```
//! A [`Request`] is plain data; the command line, the HTTP APIs, jobs and recipes all translate into it. A [`Plan`] is that
//! request understood by one [`Model`]: files read, images prepared, defaults filled in. An [`Engine`] is a loaded model on
//! some device.
//!
//! ```no_run
//! use std::sync::Arc;
//! use kiln_engine::{BatchLimit, Collect, LocalFiles, Model, Plan, Request, Settings, Setup, Task};
//!
//! let model = Arc::new(Model::open("models/klein-4b")?);
//! let request = Request { seed: vec![7], ..Request::new("a red fox in the snow") };
//! let plan = Arc::new(Plan::new(&model, &request, &LocalFiles)?);
//! let sink = Arc::new(Collect::default());
//! let engine = Setup::new(&model, &Settings::default(), Some(&plan))?.load(&*sink)?;
//! engine.generate(&[Task { plan, sink: sink.clone() }], &BatchLimit::ONE);
//! engine.finish();
//! let images = sink.take()?;
//! # Ok::<(), kiln_engine::Error>(())
//! ```
#![forbid(unsafe_code)]

mod backend;
mod collect;
mod engine;
mod error;
mod finisher;
mod gpus;
mod inputs;
mod lazy;
mod local;
pub mod machine;
mod memory;
mod model;
mod noise;
mod panics;
pub mod pipeline;
mod placement;
mod plan;
mod preview;
mod progress;
mod projection;
mod recipe;
mod request;
mod session;
mod settings;
mod setup;
mod sink;
mod text_cache;
mod tracker;

pub use backend::{DeviceInfo, WithBackend, with_backend};
pub use collect::Collect;
pub use engine::{About, Counters, Engine, Task};
pub use error::{Error, MissingPart, Result, While};
pub use gpus::{GpuInfo, Gpus, gpus};
pub use inputs::{InputImage, Inputs, LocalFiles, absolute, read_image_bytes, sha256};
pub use kiln_model::Event;
pub use kiln_weights::LoraReport;
pub use memory::MemoryNeed;
pub use model::{Model, OwnDefaults, Part, Parts, VaeFile, Variant};
pub use noise::Noise;
pub use pipeline::BatchLimit;
pub use placement::{Placement, WeightBytes};
pub use plan::{ImagePlan, InitImage, Plan, PlannedLora, Prompt, Start};
pub use progress::{Phase, Progress};
pub use recipe::{ModelRecord, PartsRecord, Recipe};
pub use request::{
    BatchPart, FileRef, LoraRef, MAX_TOKENS, OneOrMany, OutputFormat, PngEffort, Request, Rng, ScheduleKind,
};
pub use session::Session;
pub use settings::{Device, Graphs, Isa, Precision, Settings};
pub use setup::{Setup, place};
pub use sink::{Image, Sink};
pub use text_cache::TextCache;
pub use tracker::Tracker;

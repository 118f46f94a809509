//! Kiln's engine: the one interface between its programs and the model. Opens a model, resolves a request, and generates
//! images on the best device available.
//!
//! ```text
//! Request ─┐
//! Model ───┴─Plan::new──▶ Plan ──Task──┐
//! Settings ──Setup::new──▶ Setup ─load─▶ Engine ─generate──▶ Sink: events, previews, images
//! ```
//! 1. A [`Request`] says what to generate. It is plain data; the command line, the HTTP APIs, jobs and recipes translate
//!    into it.
//! 2. A [`Model`] is opened from a folder or file. Its components (transformer, text encoder, VAE) are found and checked,
//!    but not loaded.
//! 3. A [`Plan`] is the request resolved for that model: files read by an [`InputResolver`], images prepared, defaults
//!    filled in.
//! 4. A [`Setup`] chooses device, precision and the weights that stay in GPU memory, from the [`Settings`]. Loading it
//!    gives an [`Engine`].
//! 5. The engine runs [`Task`]s through its [`pipeline`] (encode, denoise, decode), several in one batch if they are alike.
//!    Each task's [`Sink`] receives [`Event`]s and [`GeneratedImage`]s; each image carries the [`Recipe`] to generate it
//!    again.
//!
//! A [`Session`] keeps an engine loaded between requests and switches models and LoRAs, as a server needs.
//!
//! ```no_run
//! use std::sync::Arc;
//! use kiln_engine::{
//!     BatchLimit, ImageCollector, LocalFiles, Model, Plan, Request, Settings, Setup, Task,
//! };
//!
//! let model = Arc::new(Model::open("models/klein-4b")?);
//! let request = Request { seed: vec![7], ..Request::new("a red fox in the snow") };
//! let plan = Arc::new(Plan::new(&model, &request, &LocalFiles)?);
//! let sink = Arc::new(ImageCollector::default());
//! let engine = Setup::new(&model, &Settings::default(), Some(&plan))?.load(&*sink)?;
//! engine.generate(&[Task { plan, sink: sink.clone() }], &BatchLimit::ONE);
//! engine.finish();
//! for image in sink.take()? {
//!     println!("{}×{}, seed {:?}", image.image.width(), image.image.height(), image.seed);
//! }
//! # Ok::<(), kiln_engine::Error>(())
//! ```
#![forbid(unsafe_code)]

mod backend;
mod content_hashes;
mod counters;
mod credentials;
mod device_lease;
mod embedded;
mod engine;
mod error;
mod gpus;
mod image_collector;
mod inputs;
mod local_engine;
pub mod machine;
mod memory;
mod model;
mod noise;
mod once;
mod output_thread;
mod panics;
pub mod pipeline;
mod plan;
mod preview;
mod progress;
mod progress_tracker;
mod projection;
mod recipe;
mod request;
mod residency;
#[cfg(feature = "schema")]
mod schema;
mod session;
mod settings;
mod setup;
mod shared_device;
mod sink;
mod text_cache;
pub mod upsample;
mod watermark;
pub mod wildcards;

pub use backend::{BackendVisitor, DeviceInfo, TrainingVisitor, with_backend, with_training_backend};
pub use content_hashes::ContentHashes;
pub use counters::Counters;
pub use credentials::{Credentials, KeySource};
pub use device_lease::{DeviceLease, TrainingNeeds};
pub use embedded::{Embedded, ImageOrigin};
pub use engine::{Engine, EngineInfo, Task};
pub use error::{
    Error, ErrorKind, Explain, Field, FieldGroup, FieldNames, Hint, MissingComponent, Piece, Result, Text,
};
pub use gpus::{AdapterInfo, GpuInfo, GpuProbe, probe_adapters, probe_gpus};
pub use image_collector::ImageCollector;
pub use inputs::{InputImage, InputResolver, InputTensors, LocalFiles, read_image_bytes};
pub use kiln_nn::{Event, StepEnd, StepReply};
pub use kiln_weights::LoraReport;
pub use memory::MemoryEstimate;
pub use model::{
    ComponentFile, ComponentPaths, ComponentWeights, Model, ModelComponent, ModelDefaults, VaeFile,
    VariantSource, Vocabulary, config_key, find_variant,
};
pub use noise::NoiseSource;
pub use pipeline::BatchLimit;
pub use plan::{
    ImagePlan, InitImage, Plan, PlannedLora, Prompt, StartingPoint, UpscaleInputs, check_range, check_request,
};
pub use progress::{Phase, Progress, StepCounts};
pub use progress_tracker::ProgressTracker;
pub use recipe::{ComponentPathsRecord, ModelRecord, Recipe};
pub use request::{
    BatchPosition, DEFAULT_CACHE_THRESHOLD, DoraRuleName, FileRef, LoraRef, OneOrMany, OutputFormat,
    PngEffort, Request, Rng, ScheduleKind, cache_threshold,
};
pub use residency::{WeightBytes, WeightResidency, plan_residency};
#[cfg(feature = "schema")]
pub use schema::json_fields;
pub use session::{LoadedEngine, Session};
pub use settings::{CudaGraphs, CudaKernels, Device, GpuApi, Isa, Precision, Settings};
pub use setup::Setup;
pub use shared_device::SharedDevice;
pub use sink::{GeneratedImage, Sink};
pub use text_cache::TextCache;
pub use watermark::{FoundWatermark, Payload, add_watermark, read_watermark};

/// Compiles the example in `docs/library.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
mod library_document {}

//! Kiln's HTTP server: OpenAI's Images API, A1111's API, a persistent job queue, and a web page.
//!
//! The server knows nothing about models: it accepts [`Request`](kiln_engine::Request)s as jobs, and the program around it
//! provides a [`Catalogue`] of available models, a [`Generator`] of images and, if it allows that, a [`Trainer`] of LoRAs. Requests are checked against [`Limits`];
//! their input images are decoded once and stored under the hash of their content. One thread plans the next jobs while
//! another drives the generator, and images are saved on the generator's own threads: a slow disk delays only the end of
//! a job, never generation.
//!
//! ```text
//! HTTP ──api──▶ Request ──limits, inputs──▶ SQLite ──fair queue──▶ plan ──▶ generate ──▶ files, SQLite
//!   ▲                                                               │         │
//!   └────── responses, server-sent events ◀── LiveJob (snapshots) ◀──┴─────────┘
//! ```
//!
//! ```no_run
//! # use kiln_server::{Catalogue, Config, Generator, Server, serve};
//! # async fn start(catalogue: Box<dyn Catalogue>, generator: impl Generator) -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::open(Config::new("data"), catalogue)?;
//! let generating = server.generate_with(generator)?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:7860").await?;
//! serve(server, listener, std::future::pending()).await;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "fleet"), expect(dead_code, reason = "what only fleets use"))]

mod alone;
mod api;
mod attempt;
mod attempts;
mod auth;
mod body_budget;
mod caller;
mod config;
mod connections;
mod decode_budget;
mod decoded_cache;
mod downloads;
mod ends;
mod fair_queue;
#[cfg(feature = "fleet")]
pub mod fleet;
mod generator;
mod health;
mod input_images;
mod intake;
mod job;
mod jobs;
mod keys;
mod limits;
mod listen;
mod live;
mod metrics;
mod page;
mod priority;
mod proxies;
mod queue;
mod random;
mod resume;
mod roles;
mod server;
mod sessions;
mod store;
mod stream;
mod tls;
mod traces;
mod trainer;
mod trainings;
mod webhooks;
mod work;
mod worker;
mod wrong_keys;

#[cfg(feature = "schema")]
pub use api::openapi;
pub use api::router;
pub use config::Config;
pub use generator::{
    Catalogue, DownloadLicence, DownloadableModel, ErrorKind, FinishedImage, Generator, InputImage, JobError,
    JobInputs, JobSink, LoadedModel, LoraInfo, ModelInfo, Task,
};
pub use keys::{ApiKey, MIN_KEY_LENGTH, Quotas};
pub use limits::Limits;
pub use listen::serve;
pub use priority::Priority;
pub use proxies::Network;
pub use server::Server;
pub use store::{GalleryLimits, StoreError};
pub use tls::{Tls, TlsError};
pub use traces::TraceConfig;
pub use trainer::{
    LossPoint, TrainableModel, Trainer, TrainingCheck, TrainingEnd, TrainingFiles, TrainingProgress,
    TrainingStep, TrainingTask,
};
pub use webhooks::WebhookConfig;

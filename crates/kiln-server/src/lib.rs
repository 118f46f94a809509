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
//! # use std::sync::Arc;
//! # use kiln_server::{Catalogue, Config, Generator, Server, serve};
//! # async fn start(catalogue: Arc<dyn Catalogue>, generator: impl Generator) -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::open(Config::new("data"), catalogue)?;
//! let generating = server.generate_with(generator)?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:7860").await?;
//! serve(server, listener, std::future::pending()).await;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "fleet"), expect(dead_code, reason = "what only fleets use"))]

#[cfg(feature = "fleet")]
pub mod fleet;
mod http;
mod jobs;

#[cfg(feature = "schema")]
pub use http::api::openapi;
pub use http::api::router;
pub use http::config::Config;
pub use http::listen::serve;
pub use http::proxies::Network;
pub use http::server::Server;
pub use http::tls::{Tls, TlsError};
pub use http::webhooks::WebhookConfig;
pub use jobs::error::{ErrorCode, JobError};
pub use jobs::generator::{
    Catalogue, DownloadLicence, DownloadableModel, FinishedImage, Generator, InputImage, JobInputs, JobSink,
    LoadedModel, LoraInfo, ModelInfo, Task,
};
pub use jobs::keys::{ApiKey, MIN_KEY_LENGTH, Quotas};
pub use jobs::limits::Limits;
pub use jobs::priority::Priority;
pub use jobs::store::{GalleryLimits, StoreError};
pub use jobs::traces::TraceConfig;
pub use jobs::trainer::{TrainableModel, Trainer, TrainingEnd, TrainingFiles};
pub use jobs::trainings::{LossPoint, TrainingCheck, TrainingProgress, TrainingStep, TrainingTask};

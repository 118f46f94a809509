//! Kiln as a service: OpenAI's Images API, A1111's, jobs with a queue that survives restarts, and a page.
//!
//! The server knows nothing of models: it takes [`Request`](kiln_engine::Request)s as jobs, and the program around it gives
//! a [`Catalogue`] of what can be asked for and a [`Generator`] that makes the images. Requests go through [`Limits`];
//! images that come with them are decoded once and kept by their content. One thread plans the next jobs while another
//! has the generator at work, and images are saved on the generator's own threads: nothing waits for a disk but the end
//! of its own job.
//!
//! ```text
//! HTTP ──api──▶ Request ──limits, intake──▶ SQLite ──schedule──▶ plan ──▶ generate ──▶ files, SQLite
//!   ▲                                                              │         │
//!   └────────── answers, server-sent events ◀── Live (snapshots) ◀─┴─────────┘
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

mod api;
mod attempt;
mod auth;
mod decoded;
mod generator;
mod intake;
mod limits;
mod listen;
mod live;
mod metrics;
mod page;
mod schedule;
mod server;
mod store;
mod worker;

pub use api::{openapi, router};
pub use generator::{
    Blame, Catalogue, Finished, Generator, InputImage, JobError, JobInputs, JobSink, ModelInfo, Task,
};
pub use limits::Limits;
pub use listen::serve;
pub use server::{Config, Server};
pub use store::StoreError;

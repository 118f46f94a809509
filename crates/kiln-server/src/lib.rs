//! Kiln as a service: OpenAI's Images API, A1111's, jobs with a queue that survives restarts, and a page.
//!
//! The server knows nothing of models: it takes [`Order`]s, and the program around it gives a [`Catalogue`] of what can be
//! asked for and a [`Painter`] who paints. Orders go through [`Limits`], pictures that come with them are kept by their
//! content, and one thread paints one order after the other.
//!
//! ```text
//! request ──api──▶ Order ──limits, intake──▶ SQLite ──schedule──▶ Painter ──▶ files, SQLite
//!    ▲                                                              │
//!    └────────── answers, server-sent events ◀── Live (snapshots) ◀─┘
//! ```
//!
//! ```no_run
//! # use kiln_server::{Catalogue, Config, Painter, Server, serve};
//! # async fn start(catalogue: Box<dyn Catalogue>, painter: Box<dyn Painter>) -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::open(Config::new("data"), catalogue)?;
//! server.paint_with(painter)?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:7860").await?;
//! serve(server, listener, std::future::pending()).await;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod api;
mod auth;
mod engine;
mod intake;
mod limits;
mod listen;
mod live;
mod metrics;
mod order;
mod page;
mod schedule;
mod server;
mod store;
mod worker;

pub use api::{openapi, router};
pub use engine::{
    Blame, Catalogue, ModelInfo, Painted, Painter, Part, Phase, Progress, Trouble, Watch, Work,
};
pub use limits::Limits;
pub use listen::serve;
pub use order::{LoraOrder, Order, OutputFormat, PngEffort};
pub use server::{Config, Server};
pub use store::StoreError;

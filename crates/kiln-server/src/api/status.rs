//! How the server itself stands.

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ApiError;
use super::{answer, json};
use crate::Server;
use crate::auth::COOKIE;

/// How the server stands.
#[derive(Serialize, ToSchema)]
pub(crate) struct Standing {
    /// `ok`, `starting` or `stopping`.
    status: &'static str,
}

/// Whether the server lives.
#[utoipa::path(get, path = "/healthz", tag = "server", responses((status = 200, body = Standing)))]
pub(crate) async fn health() -> Response {
    json(StatusCode::OK, &Standing { status: "ok" })
}

/// Whether jobs are generated: the model is loaded.
#[utoipa::path(get, path = "/readyz", tag = "server", responses(
    (status = 200, body = Standing),
    (status = 503, description = "Starting or stopping", body = Standing),
))]
pub(crate) async fn ready(State(server): State<Server>) -> Response {
    match server.is_ready() {
        true => json(StatusCode::OK, &Standing { status: "ok" }),
        false => {
            let status = if *server.closing.borrow() { "stopping" } else { "starting" };
            json(StatusCode::SERVICE_UNAVAILABLE, &Standing { status })
        }
    }
}

/// Counters in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", tag = "server", responses((status = 200, description = "Counters", content_type = "text/plain")))]
pub(crate) async fn metrics(State(server): State<Server>) -> Response {
    let text = server.metrics.text(&server.gauges());
    answer(StatusCode::OK, "text/plain; version=0.0.4", text.into())
}

/// A list of names.
#[derive(Serialize, ToSchema)]
pub(crate) struct NameList {
    /// The names.
    data: Vec<String>,
}

/// Every LoRA that can be asked for.
#[utoipa::path(get, path = "/v1/loras", tag = "server", responses((status = 200, body = NameList)))]
pub(crate) async fn loras(State(server): State<Server>) -> Response {
    json(StatusCode::OK, &NameList { data: server.catalogue.loras() })
}

/// Every autoencoder that can be asked for instead of a model's own.
#[utoipa::path(get, path = "/v1/vaes", tag = "server", responses((status = 200, body = NameList)))]
pub(crate) async fn vaes(State(server): State<Server>) -> Response {
    json(StatusCode::OK, &NameList { data: server.catalogue.vaes() })
}

/// What the page has to know.
#[derive(Serialize, ToSchema)]
pub(crate) struct About {
    /// The version of Kiln.
    version: &'static str,
    /// Jobs that wait.
    waiting: usize,
    /// Jobs that may wait.
    capacity: usize,
    /// The longest side.
    side: u32,
    /// Pixels of an image.
    pixels: u64,
    /// Steps.
    steps: u32,
    /// Images of one job.
    pictures: u32,
    /// Images to work from.
    references: usize,
    /// Bytes of a prompt.
    prompt: usize,
    /// Tokens that a prompt may be padded to.
    tokens: u32,
}

/// The server's limits, and how many jobs wait.
#[utoipa::path(get, path = "/v1/about", tag = "server", responses((status = 200, body = About)))]
pub(crate) async fn about(State(server): State<Server>) -> Response {
    let limits = &server.config.limits;
    let about = About {
        version: env!("CARGO_PKG_VERSION"),
        waiting: server.gauges().waiting,
        capacity: limits.queue,
        side: limits.side,
        pixels: limits.pixels,
        steps: limits.steps,
        pictures: limits.pictures,
        references: limits.references,
        prompt: limits.prompt,
        tokens: limits.tokens,
    };
    json(StatusCode::OK, &about)
}

/// A session for a browser that sent the API key: a cookie that pages' scripts can't read.
#[utoipa::path(post, path = "/v1/session", tag = "server", responses(
    (status = 200, body = Standing),
    (status = 401, description = "The key is wrong", body = super::error::ErrorBody),
))]
pub(crate) async fn session(State(server): State<Server>) -> Result<Response, ApiError> {
    let mut response = json(StatusCode::OK, &Standing { status: "ok" });
    if server.keys.needed() {
        let cookie = format!("{COOKIE}={}; HttpOnly; SameSite=Strict; Path=/", server.keys.session());
        if let Ok(value) = HeaderValue::from_str(&cookie) {
            response.headers_mut().insert(header::SET_COOKIE, value);
        }
    }
    Ok(response)
}

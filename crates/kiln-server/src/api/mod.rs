//! The HTTP APIs: routes, request parsing and responses.

pub(crate) mod a1111;
mod body;
mod downloads;
pub(crate) mod error;
mod fields;
mod gallery;
mod images;
mod inputs;
mod jobs;
mod loras;
mod marks;
mod multipart;
mod openai;
mod plots;
mod queue;
mod recipes;
mod router;
mod sse;
mod status;

use std::net::SocketAddr;

use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use kiln_engine::Request;
use serde::Serialize;

use crate::Server;
use crate::live::{Api, JobSnapshot};
use crate::server::AttachedJob;
use error::ApiError;
pub use router::{openapi, router};

/// The address of a connection's client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// The client that a request counts for in the fair queue: the header `X-Client-Id`, or else the IP address.
pub(crate) struct Client(pub(crate) String);

impl Client {
    pub(crate) fn of(parts: &Parts) -> Client {
        let named = parts.headers.get("x-client-id").and_then(|value| value.to_str().ok());
        let address = || parts.extensions.get::<Peer>().map(|peer| peer.0.ip().to_string());
        let name = named.map(str::to_owned).filter(|n| !n.is_empty()).or_else(address).unwrap_or_default();
        Client(name.chars().take(64).collect())
    }
}

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(Client::of(parts))
    }
}

/// A JSON response.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => response(status, "application/json", text.into()),
        Err(error) => {
            tracing::error!(%error, "failed to serialize a response");
            response(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", Bytes::new())
        }
    }
}

/// A response with this body.
pub(crate) fn response(status: StatusCode, media_type: &'static str, bytes: Bytes) -> Response {
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

/// Runs blocking work away from the threads that serve requests.
pub(crate) async fn run_blocking<T: Send + 'static, E: Send + 'static + Into<ApiError>>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => {
            let message = "internal error: handling the request panicked";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "panicked", message))
        }
    }
}

/// Submits a job that the client waits for on this connection.
pub(crate) async fn submit_attached(
    server: &Server,
    request: Request,
    client: &str,
    api: Api,
) -> Result<AttachedJob, ApiError> {
    let (server, client) = (server.clone(), client.to_owned());
    run_blocking(move || {
        let request = server.accept_request(request).map_err(ApiError::from)?;
        let live = server.submit(request, &client, api, true).map_err(ApiError::from)?;
        // Attach here: if the client disconnects while this runs, the job is still cancelled.
        Ok::<_, ApiError>(AttachedJob::new(&server, live))
    })
    .await
}

/// Waits for the end of a job and returns its last snapshot.
pub(crate) async fn wait_until_ended(attached: &AttachedJob) -> JobSnapshot {
    let mut watch = attached.live.watch();
    let end = watch.wait_for(|snapshot| snapshot.state.is_final()).await;
    end.map_or_else(|_| attached.live.snapshot(), |snapshot| snapshot.clone())
}

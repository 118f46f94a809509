//! Requests and answers.

pub(crate) mod a1111;
mod body;
pub(crate) mod error;
mod fields;
mod gallery;
mod images;
mod inputs;
mod jobs;
mod multipart;
mod openai;
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
use crate::live::{Snapshot, Via};
use crate::server::Attached;
use error::ApiError;
pub use router::{openapi, router};

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Who asks, for fairness: what the header `X-Client-Id` says, else the address.
pub(crate) struct Client(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let named = parts.headers.get("x-client-id").and_then(|value| value.to_str().ok());
        let address = || parts.extensions.get::<Peer>().map(|peer| peer.0.ip().to_string());
        let name = named.map(str::to_owned).filter(|n| !n.is_empty()).or_else(address).unwrap_or_default();
        Ok(Client(name.chars().take(64).collect()))
    }
}

/// An answer in JSON.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => answer(status, "application/json", text.into()),
        Err(error) => {
            tracing::error!(%error, "an answer could not be written");
            answer(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", Bytes::new())
        }
    }
}

/// An answer of any kind.
pub(crate) fn answer(status: StatusCode, media_type: &'static str, bytes: Bytes) -> Response {
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

/// Runs what takes its time away from the threads that answer.
pub(crate) async fn aside<T: Send + 'static, E: Send + 'static + Into<ApiError>>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => {
            let message = "the request went wrong in an unforeseen way";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "panicked", message))
        }
    }
}

/// Takes a job that is waited for, together with its images.
pub(crate) async fn attach(
    server: &Server,
    request: Request,
    client: &str,
    via: Via,
) -> Result<Attached, ApiError> {
    let (server, client) = (server.clone(), client.to_owned());
    aside(move || {
        let request = server.take_in(request).map_err(ApiError::from)?;
        let live = server.submit(request, &client, via, true).map_err(ApiError::from)?;
        // Attached here: a client that goes away before the answer is looked at leaves nothing behind.
        Ok::<_, ApiError>(Attached::new(&server, live))
    })
    .await
}

/// Waits for the end of a job. A caller who goes away, goes away with it.
pub(crate) async fn finished(attached: &Attached) -> Snapshot {
    let mut watch = attached.live.watch();
    let end = watch.wait_for(|snapshot| snapshot.state.is_final()).await;
    end.map_or_else(|_| attached.live.now(), |snapshot| snapshot.clone())
}

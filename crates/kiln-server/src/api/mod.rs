//! The HTTP APIs: routes, request parsing and responses.

pub(crate) mod a1111;
mod body;
pub(crate) mod caller;
mod conditional;
mod downloads;
pub(crate) mod error;
mod extract;
pub(crate) mod fields;
mod file;
mod gallery;
mod images;
mod inputs;
mod job_events;
pub(crate) mod jobs;
mod loras;
mod marks;
mod multipart;
mod openai;
#[cfg(feature = "schema")]
mod openapi;
mod plots;
mod prompts;
mod queue;
mod recipes;
mod router;
mod sse;
mod status;
mod training_events;
mod trainings;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use kiln_base::lock;
use kiln_engine::Request;
use serde::Serialize;

use crate::Server;
use crate::live::{Api, JobSnapshot};
use crate::server::{AttachedJob, NewJob};
use body::BodyPermit;
pub(crate) use caller::Caller;
use error::ApiError;
pub(crate) use extract::{Path, Query, checked_limit};
pub(crate) use file::bytes_response;
#[cfg(feature = "fleet")]
pub(crate) use gallery::shrink;
#[cfg(feature = "schema")]
pub use router::openapi;
#[cfg(feature = "fleet")]
pub(crate) use router::probes;
pub use router::router;

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) encrypted: bool,
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

/// Lets browsers cache a file forever: it never changes under its name.
pub(crate) fn immutable(response: Response) -> Response {
    cached(response, "private, max-age=31536000, immutable")
}

/// Lets browsers keep a file, and ask by its tag whether it is still the same.
pub(crate) fn cached_while_valid(response: Response) -> Response {
    cached(response, "private, no-cache")
}

fn cached(mut response: Response, rule: &'static str) -> Response {
    if !response.status().is_client_error() {
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static(rule));
    }
    response
}

/// Adds the address of what a request has created.
pub(crate) fn with_location(mut response: Response, path: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(path) {
        response.headers_mut().insert(header::LOCATION, value);
    }
    response
}

/// Runs blocking work away from the threads that serve requests.
pub(crate) async fn run_blocking<T: Send + 'static, E: Send + 'static + Into<ApiError>>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, ApiError> {
    // The request's span goes along: what `work` logs has the request's id.
    let span = tracing::Span::current();
    let result = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&result);
    // One type of task for all handlers: tokio's code is compiled for each type.
    let task: Box<dyn FnOnce() + Send> = Box::new(move || *lock(&slot) = Some(span.in_scope(work)));
    let _ = tokio::task::spawn_blocking(task).await;
    let result = lock(&result).take();
    match result {
        Some(result) => result.map_err(Into::into),
        None => {
            let message = "internal error: handling the request panicked";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "panicked", message))
        }
    }
}

/// Submits a job that the client waits for on this connection. The memory of its body is given back when its images are
/// stored, even if the client disconnects before that.
pub(crate) async fn submit_attached(
    server: &Server,
    request: Request,
    caller: &Caller,
    api: Api,
    permit: BodyPermit,
) -> Result<AttachedJob, ApiError> {
    let (server, caller) = (server.clone(), caller.clone());
    run_blocking(move || {
        let request = server.accept_request(request, &caller).map_err(ApiError::from)?;
        drop(permit);
        let live = server.submit(NewJob::attached(request, caller, api)).map_err(ApiError::from)?;
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

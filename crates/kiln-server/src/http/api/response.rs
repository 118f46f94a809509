//! Responses, and how long browsers keep them.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use serde::Serialize;

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

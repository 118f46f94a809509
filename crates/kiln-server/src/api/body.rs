//! Requests in: whole, but not too large, not too slow, and not too many at once.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};

use super::error::ApiError;
use crate::Server;

/// How long a request waits for memory.
const WAIT: Duration = Duration::from_secs(5);
/// How many times the patience between two parts the whole may take.
const PARTS: u32 = 10;

/// Memory that is set aside for a request.
pub(crate) type Room = OwnedSemaphorePermit;

/// A request's body.
pub(crate) struct Whole {
    pub(crate) bytes: Bytes,
    pub(crate) room: Room,
}

impl Whole {
    pub(crate) async fn read(server: &Server, headers: &HeaderMap, body: Body) -> Result<Whole, ApiError> {
        let limit = server.config.limits.body;
        let too_large = || {
            let message = format!("the request is larger than {limit} bytes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
        };
        let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|length| length > limit) {
            return Err(too_large());
        }
        let kib = (length.unwrap_or(limit) / 1024 + 1).min(limit / 1024).max(1) as u32;
        let room = timeout(WAIT, server.bodies.clone().acquire_many_owned(kib)).await;
        let Ok(Ok(room)) = room else {
            let message = "too many large requests at the same time; try again";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message).retry_after(5));
        };
        let patience = server.config.patience;
        let end = Instant::now() + patience * PARTS;
        let slow =
            |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "too_slow", "the request did not arrive in time");
        let mut body = body;
        let mut bytes = BytesMut::with_capacity(length.unwrap_or(0));
        loop {
            let next = timeout_at(end.min(Instant::now() + patience), body.frame()).await.map_err(slow)?;
            let Some(frame) = next else { break };
            let frame =
                frame.map_err(|error| ApiError::invalid(format!("the request broke off: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err(too_large());
            }
            bytes.extend_from_slice(&data);
        }
        Ok(Whole { bytes: bytes.freeze(), room })
    }
}

/// A JSON body, and the memory set aside for it.
pub(crate) struct Json<T>(pub(crate) T, pub(crate) Room);

impl<T: DeserializeOwned> FromRequest<Server> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Server) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        // Browsers send anything else without asking whether they may.
        if media_type(&parts.headers) != "application/json" {
            let message = "expected a body of type application/json";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_type", message));
        }
        let whole = Whole::read(server, &parts.headers, body).await?;
        Ok(Json(parse(&whole.bytes)?, whole.room))
    }
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::invalid(format!("invalid request: {error}")))
}

/// The type of a body, without its parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

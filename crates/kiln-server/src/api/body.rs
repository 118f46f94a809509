//! Reads request bodies, with limits on size, time and total memory.

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

/// How long a request waits for a memory permit.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a whole body, in multiples of the timeout between two chunks.
const BODY_TIMEOUTS: u32 = 10;

/// A permit to hold a request body in memory.
pub(crate) type BodyPermit = OwnedSemaphorePermit;

/// The body of a request, fully read.
pub(crate) struct RequestBody {
    pub(crate) bytes: Bytes,
    pub(crate) permit: BodyPermit,
}

impl RequestBody {
    pub(crate) async fn read(
        server: &Server,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<RequestBody, ApiError> {
        let limit = server.config.limits.body;
        let too_large = || {
            let message = format!("the request body exceeds the limit of {limit} bytes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
        };
        let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|length| length > limit) {
            return Err(too_large());
        }
        let kib = (length.unwrap_or(limit) / 1024 + 1).min(limit / 1024).max(1) as u32;
        let permit = timeout(PERMIT_TIMEOUT, server.body_permits.clone().acquire_many_owned(kib)).await;
        let Ok(Ok(permit)) = permit else {
            let message = "too many large requests in progress; try again later";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message).retry_after(5));
        };
        let chunk_timeout = server.config.io_timeout;
        let deadline = Instant::now() + chunk_timeout * BODY_TIMEOUTS;
        let slow = |_| {
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "too_slow", "the request body did not arrive in time")
        };
        let mut body = body;
        let mut bytes = BytesMut::with_capacity(length.unwrap_or(0));
        loop {
            let next =
                timeout_at(deadline.min(Instant::now() + chunk_timeout), body.frame()).await.map_err(slow)?;
            let Some(frame) = next else { break };
            let frame = frame
                .map_err(|error| ApiError::invalid(format!("failed to read the request body: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Err(too_large());
            }
            bytes.extend_from_slice(&data);
        }
        Ok(RequestBody { bytes: bytes.freeze(), permit })
    }
}

/// A JSON body and its memory permit.
pub(crate) struct Json<T>(pub(crate) T, pub(crate) BodyPermit);

impl<T: DeserializeOwned> FromRequest<Server> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Server) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        // A foreign page can send other types without a CORS preflight.
        if media_type(&parts.headers) != "application/json" {
            let message = "expected content type application/json";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_type", message));
        }
        let body = RequestBody::read(server, &parts.headers, body).await?;
        Ok(Json(parse(&body.bytes)?, body.permit))
    }
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::invalid(format!("invalid request: {error}")))
}

/// The content type without its parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

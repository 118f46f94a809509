//! Reads request bodies, with limits on size, time and total memory.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRef, FromRequest, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Frame;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};

use super::error::{ApiError, BUSY_RETRY_SECONDS};
use super::{Caller, run_blocking};
pub(crate) use crate::http::body_budget::BodyPermit;
use crate::http::body_budget::{BodyBudget, Refused, SMALL_BODY};
use crate::http::config::Config;
use crate::jobs::error::ErrorCode;

/// Maximum number of values in a JSON body.
const MAX_VALUES: usize = 100_000;
/// Time limit for a whole body, in multiples of the timeout between two chunks.
const BODY_TIMEOUTS: u32 = 10;

/// Reads bodies within the server's limits.
#[derive(Clone)]
pub(crate) struct BodyReader {
    pub(crate) config: Arc<Config>,
    pub(crate) budget: Arc<BodyBudget>,
}

/// The body of a request, fully read.
pub(crate) struct RequestBody {
    pub(crate) bytes: Bytes,
    pub(crate) permit: BodyPermit,
}

impl BodyReader {
    /// Reads a body into memory that is reserved as the bytes arrive.
    pub(crate) async fn read(&self, parts: &Parts, body: Body) -> Result<RequestBody, ApiError> {
        let limit = self.config.limits.body;
        let too_large = || {
            let message = format!("the request body exceeds the limit of {limit} bytes");
            ApiError::new(ErrorCode::TooLarge, message)
        };
        let length = parts.headers.get(header::CONTENT_LENGTH);
        let length = length.and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|length| length > limit) {
            return Err(too_large());
        }
        let mut permit = self.budget.start(&Caller::of(parts)?.client);
        let mut speed = SpeedCheck::new(&self.config);
        let (mut body, mut bytes) = (body, Vec::new());
        while let Some(frame) = speed.next(&mut body).await? {
            let Ok(data) = frame.into_data() else { continue };
            let needed = bytes.len() + data.len();
            if needed > limit {
                return Err(too_large());
            }
            if needed > bytes.capacity() {
                // Doubling, but never beyond the announced length.
                let most = length.unwrap_or(limit).max(needed);
                let capacity = needed.max(2 * bytes.capacity()).min(most);
                let asked = Instant::now();
                permit.grow(capacity).await.map_err(busy)?;
                speed.paused(asked.elapsed());
                bytes.reserve_exact(capacity - bytes.len());
            }
            bytes.extend_from_slice(&data);
        }
        permit.arrived();
        Ok(RequestBody { bytes: bytes.into(), permit })
    }
}

fn busy(refused: Refused) -> ApiError {
    let message = match refused {
        Refused::ClientShare => "this client has too many large requests in progress; try again later",
        Refused::Full => "too many large requests in progress; try again later",
    };
    ApiError::new(ErrorCode::Busy, message).retry_after(BUSY_RETRY_SECONDS)
}

/// Ends a body that arrives too slowly: the rule applies to each interval of [`Config::io_timeout`](crate::Config), so
/// that a fast start earns no credit.
struct SpeedCheck {
    interval: Duration,
    /// Least bytes of an interval.
    least: usize,
    interval_end: Instant,
    received: usize,
    deadline: Instant,
}

impl SpeedCheck {
    fn new(config: &Config) -> SpeedCheck {
        let (interval, now) = (config.io_timeout, Instant::now());
        let least = interval.as_secs_f64() * config.limits.body_speed as f64;
        let deadline = now + interval * BODY_TIMEOUTS;
        SpeedCheck { interval, least: least as usize, interval_end: now + interval, received: 0, deadline }
    }

    /// Time during which the client was not asked for bytes.
    fn paused(&mut self, time: Duration) {
        self.interval_end += time;
        self.deadline += time;
    }

    /// The next frame of the body; `None` at its end.
    async fn next(&mut self, body: &mut Body) -> Result<Option<Frame<Bytes>>, ApiError> {
        loop {
            let frame = timeout_at(self.interval_end.min(self.deadline), body.frame()).await;
            if let Ok(Some(Ok(frame))) = &frame {
                self.received += frame.data_ref().map_or(0, Bytes::len);
            }
            let (now, ended) = (Instant::now(), matches!(frame, Ok(None)));
            if now >= self.interval_end && !ended {
                let slow = std::mem::take(&mut self.received) < self.least;
                self.interval_end = now + self.interval;
                if slow {
                    return Err(too_slow());
                }
            }
            match frame {
                Ok(frame) => {
                    let failed =
                        |error| ApiError::invalid(format!("failed to read the request body: {error}"));
                    return frame.transpose().map_err(failed);
                }
                Err(_) if now >= self.deadline => return Err(too_slow()),
                Err(_) => {}
            }
        }
    }
}

fn too_slow() -> ApiError {
    let message = "the request body did not arrive in time";
    ApiError::new(ErrorCode::TooSlow, message)
}

impl<S: Sync> FromRequest<S> for RequestBody
where
    BodyReader: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        BodyReader::from_ref(state).read(&parts, body).await
    }
}

/// A JSON body and its memory permit.
pub(crate) struct Json<T>(pub(crate) T, pub(crate) BodyPermit);

impl<S: Sync, T: DeserializeOwned + Send + 'static> FromRequest<S> for Json<T>
where
    BodyReader: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        // A foreign page can send other types without a CORS preflight.
        if media_type(&parts.headers) != "application/json" {
            let message = "expected content type application/json";
            return Err(ApiError::new(ErrorCode::MediaType, message));
        }
        let body = BodyReader::from_ref(state).read(&parts, body).await?;
        let body_is_small = body.bytes.len() <= SMALL_BODY;
        let parse_body = move || Ok(Json(parse(&body.bytes)?, body.permit));
        // A large body takes long enough to keep other requests waiting.
        if body_is_small { parse_body() } else { run_blocking(parse_body).await }
    }
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    check_values(&[bytes])?;
    serde_json::from_slice(bytes).map_err(|error| ApiError::invalid(format!("invalid request: {error}")))
}

/// Refuses JSON texts that have more than [`MAX_VALUES`] values together. A value takes up to sixteen times the memory of
/// its text: a list of zeros is small as a body and large in memory.
pub(super) fn check_values(texts: &[&[u8]]) -> Result<(), ApiError> {
    let mut separators = 0;
    if texts.iter().any(|text| has_many_values(text, &mut separators)) {
        return Err(ApiError::invalid(format!("invalid request: it has more than {MAX_VALUES} values")));
    }
    Ok(())
}

/// Adds the separators of values; returns whether there are more than [`MAX_VALUES`].
fn has_many_values(json: &[u8], separators: &mut usize) -> bool {
    let mut rest = json;
    while let Some(at) = rest.iter().position(|byte| matches!(byte, b'"' | b',' | b'[' | b'{')) {
        let text = rest[at] == b'"';
        rest = &rest[at + 1..];
        if text {
            rest = after_string(rest);
        } else {
            *separators += 1;
            if *separators > MAX_VALUES {
                return true;
            }
        }
    }
    false
}

/// What comes after a string that has begun.
fn after_string(mut rest: &[u8]) -> &[u8] {
    while let Some(at) = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')) {
        let skipped = if rest[at] == b'"' { 1 } else { 2 };
        let end = rest[at] == b'"';
        rest = rest.get(at + skipped..).unwrap_or_default();
        if end {
            return rest;
        }
    }
    &[]
}

/// The content type without its parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        let list = |n: usize| format!("{{\"a\": [{}0]}}", "0,".repeat(n));
        let has_many_values = |json: &[u8]| check_values(&[json]).is_err();
        assert!(
            !has_many_values(list(MAX_VALUES - 2).as_bytes()) && has_many_values(list(MAX_VALUES).as_bytes())
        );
        assert!(has_many_values("[".repeat(MAX_VALUES + 1).as_bytes()));
        let text = format!("{{\"a\": \"\\\"{}\\\\\", \"b\": 1}}", ",[{".repeat(MAX_VALUES));
        assert!(
            serde_json::from_str::<serde_json::Value>(&text).is_ok() && !has_many_values(text.as_bytes())
        );
        let halves = list(MAX_VALUES / 2);
        assert!(!has_many_values(halves.as_bytes()) && check_values(&[halves.as_bytes(); 2]).is_err());
        for odd in ["", "\"", "\"\\", "\"\\\"", "\"a\",\""] {
            assert!(!has_many_values(odd.as_bytes()));
        }
    }
}

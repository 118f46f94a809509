//! Errors as clients see them: a status, a stable code and a sentence, in OpenAI's shape.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::generator::{Blame, JobError};
use crate::server::Refused;
use crate::store::StoreError;

/// An error's body. `detail` repeats the sentence where A1111's clients look for it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
    /// The sentence again.
    pub detail: String,
}

/// What went wrong.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// A sentence for people.
    pub message: String,
    /// `invalid_request_error`, `authentication_error`, `rate_limit_error` or `server_error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The parameter, where one is to blame.
    pub param: Option<String>,
    /// A stable word for programs.
    pub code: String,
}

/// Why a request was not answered as hoped.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: String,
    message: String,
    retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> ApiError {
        ApiError { status, code: code.into(), message: message.into(), retry_after: None }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    pub(crate) fn not_found(what: &str, id: &str) -> ApiError {
        let id: String = id.chars().take(80).collect();
        ApiError::new(StatusCode::NOT_FOUND, "not_found", format!("there is no {what} `{id}`"))
    }

    pub(crate) fn retry_after(mut self, seconds: u64) -> ApiError {
        self.retry_after = Some(seconds);
        self
    }

    pub(crate) fn body(&self) -> ErrorBody {
        let kind = match self.status.as_u16() {
            401 | 403 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        let error = ErrorDetail {
            message: self.message.clone(),
            kind: kind.into(),
            param: None,
            code: self.code.clone(),
        };
        ErrorBody { error, detail: self.message.clone() }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = super::json(self.status, &self.body());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<JobError> for ApiError {
    fn from(error: JobError) -> ApiError {
        let status = match (error.blame, error.code) {
            (_, "model_not_found" | "lora_not_found" | "vae_not_found" | "input_not_found") => {
                StatusCode::NOT_FOUND
            }
            (Blame::Request, _) => StatusCode::BAD_REQUEST,
            (Blame::Cancelled, _) => StatusCode::CONFLICT,
            (Blame::Server, "shutting_down" | "storage") => StatusCode::SERVICE_UNAVAILABLE,
            (Blame::Server, "timeout") => StatusCode::GATEWAY_TIMEOUT,
            (Blame::Server, _) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        ApiError::new(status, error.code, error.message)
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        tracing::error!(%error, "the store failed");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "storage", error.to_string())
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        match refused {
            Refused::Full { seconds, own } => {
                let whose =
                    if own { "this client has as many jobs waiting as it may" } else { "the queue is full" };
                let message = format!("{whose}; try again in {seconds} s");
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message).retry_after(seconds)
            }
            Refused::Closing => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the server is stopping")
                    .retry_after(10)
            }
            Refused::Store(error) => error.into(),
        }
    }
}

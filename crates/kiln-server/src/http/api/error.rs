//! Errors as clients see them: a status, a stable code and a message, in OpenAI's format.

use std::borrow::Cow;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::roles::SubmitError;
use crate::jobs::store::StoreError;

/// When to try again after `busy`, in seconds.
pub(crate) const BUSY_RETRY_SECONDS: u64 = 5;

/// The body of an error response. `detail` repeats the message for clients of A1111's API.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
    /// The message again.
    pub detail: String,
}

/// An error.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ErrorDetail {
    /// A message for people.
    pub message: String,
    /// `invalid_request_error`, `authentication_error`, `rate_limit_error` or `server_error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The field of the request that is wrong, where one is.
    pub param: Option<String>,
    /// A stable code for programs.
    pub code: String,
}

/// An error response.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: ErrorCode,
    message: String,
    param: Option<Cow<'static, str>>,
    retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> ApiError {
        let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after = (code == ErrorCode::Busy).then_some(BUSY_RETRY_SECONDS);
        ApiError { status, code, message: message.into(), param: None, retry_after }
    }

    /// Replaces the status that its code usually has.
    pub(crate) fn with_status(mut self, status: StatusCode) -> ApiError {
        self.status = status;
        self
    }

    pub(crate) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(ErrorCode::InvalidRequest, message)
    }

    pub(crate) fn not_found(what: &str, id: &str) -> ApiError {
        JobError::not_found(ErrorCode::NotFound, what, id).into()
    }

    /// An error of a job under the code that OpenAI's clients know, where it has one.
    pub(crate) fn for_openai(error: JobError) -> ApiError {
        match error.code {
            ErrorCode::ImageRefused => ApiError::new(ErrorCode::ContentPolicyViolation, error.message),
            _ => error.into(),
        }
    }

    /// Names the field of the request that is wrong.
    pub(crate) fn param(mut self, name: impl Into<Cow<'static, str>>) -> ApiError {
        self.param = Some(name.into());
        self
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
            param: self.param.as_deref().map(Into::into),
            code: self.code.name().into(),
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
        ApiError { param: error.param, ..ApiError::new(error.code, error.message) }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        tracing::error!(%error, "storage failed");
        JobError::from(error).into()
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        match error {
            SubmitError::QueueFull { retry_after_seconds, client_limit } => {
                let reason =
                    if client_limit { "this client has too many queued jobs" } else { "the queue is full" };
                let message = format!("{reason}; try again in {retry_after_seconds} s");
                ApiError::new(ErrorCode::QueueFull, message).retry_after(retry_after_seconds)
            }
            SubmitError::RateLimited { retry_after_seconds } => {
                let message =
                    format!("this key submits too many jobs a minute; try again in {retry_after_seconds} s");
                ApiError::new(ErrorCode::RateLimited, message).retry_after(retry_after_seconds)
            }
            SubmitError::Stopping => {
                ApiError::new(ErrorCode::ShuttingDown, "the server is stopping").retry_after(10)
            }
            SubmitError::Repeated(_) => {
                let message = "the idempotency key was used before";
                ApiError::new(ErrorCode::IdempotencyKey, message).with_status(StatusCode::CONFLICT)
            }
            SubmitError::Refused(error) => error.into(),
            SubmitError::Store(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use kiln_engine::ErrorKind;

    use super::*;

    #[test]
    fn every_kind_has_the_documented_status_and_code() {
        let table = include_str!("../../../../../docs/errors.md");
        for kind in ErrorKind::ALL {
            let row = table.lines().find(|line| line.starts_with(&format!("| {} |", kind.name())));
            let row = row.unwrap_or_else(|| panic!("{kind:?} is not in the table"));
            let error = JobError::explained(&kiln_engine::Error::refused(*kind, "odd"));
            let code = error.code.name();
            let status = ApiError::from(error).into_response().status();
            let found: Vec<&str> = row.split(" | ").skip(3).take(2).collect();
            assert_eq!(found, [status.as_str(), code], "{kind:?}");
        }
    }
}

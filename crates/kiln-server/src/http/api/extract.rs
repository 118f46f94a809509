//! Path and query parameters of a request. Errors are JSON, as everywhere.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequestParts, Path as AxumPath, Query as AxumQuery};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::error::ApiError;

/// Parameters in the path.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = AxumPath::from_request_parts(parts, state).await;
        let AxumPath(value) = path.map_err(|error: PathRejection| {
            ApiError::invalid(format!("invalid path: {}", error.body_text()))
        })?;
        Ok(Path(value))
    }
}

/// Parameters in the query.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = AxumQuery::from_request_parts(parts, state).await;
        let AxumQuery(value) = query.map_err(|error: QueryRejection| {
            ApiError::invalid(format!("invalid query: {}", error.body_text()))
        })?;
        Ok(Query(value))
    }
}

/// The length of a list that a request asks for.
pub(crate) fn checked_limit(given: Option<i64>, default: u32, most: u32) -> Result<u32, ApiError> {
    match given.map(u32::try_from) {
        None => Ok(default),
        Some(Ok(limit)) if (1..=most).contains(&limit) => Ok(limit),
        _ => {
            let found = given.unwrap_or_default();
            Err(ApiError::invalid(format!("limit must be between 1 and {most}, found {found}"))
                .param("limit"))
        }
    }
}

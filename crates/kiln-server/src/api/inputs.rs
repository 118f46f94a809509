//! Images to work from, sent once and named in any number of jobs.

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::body::Whole;
use super::error::{ApiError, ErrorBody};
use super::{answer, aside, json};
use crate::Server;
use crate::generator::JobError;

/// An image that was sent.
#[derive(Serialize, ToSchema)]
pub(crate) struct InputView {
    /// What jobs call it.
    id: String,
    /// Width in pixels, as stored.
    width: u32,
    /// Height in pixels.
    height: u32,
}

/// Keeps an image file: PNG, JPEG, WebP, GIF, BMP or TIFF.
#[utoipa::path(post, path = "/v1/inputs", tag = "jobs", request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 201, body = InputView), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn keep(State(server): State<Server>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let whole = Whole::read(&server, &parts.headers, body).await?;
    aside(move || {
        let id = server.keep_input(&whole.bytes, "picture")?;
        let size = kiln_image::dimensions("picture", &whole.bytes);
        let (width, height) = size.map_err(|e| JobError::request("invalid_picture", e.to_string()))?;
        Ok::<_, ApiError>(json(StatusCode::CREATED, &InputView { id, width, height }))
    })
    .await
}

/// The file of an image that was sent.
#[utoipa::path(get, path = "/v1/inputs/{id}", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, description = "The file", content_type = "application/octet-stream"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn file(State(server): State<Server>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let path = server.store.inputs().path(&id).ok_or_else(|| ApiError::not_found("input", &id))?;
    let bytes = aside(move || std::fs::read(path).map_err(|_| ApiError::not_found("input", &id))).await?;
    // The type is the browser's to find out; it is told to treat it as nothing but an image.
    Ok(answer(StatusCode::OK, "application/octet-stream", bytes.into()))
}

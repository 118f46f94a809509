//! Uploaded input images, which any number of jobs can name.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;

use super::body::RequestBody;
use super::conditional::ETag;
use super::error::ApiError;
use super::file::file_response;
use super::recipes::UNREADABLE;
use super::{Caller, Path, immutable, json, run_blocking, with_location};
use crate::jobs::error::JobError;
use crate::jobs::intake::Intake;

/// An uploaded image.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct InputView {
    /// Its name for requests: `input:` and the SHA-256 of the file.
    id: String,
    /// Width in pixels.
    width: u32,
    /// Height in pixels.
    height: u32,
    /// Whether it holds a recipe: see `/v1/inputs/{id}/recipe`.
    recipe: bool,
    /// Why its recipe can't be read, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    recipe_error: Option<String>,
}

/// Uploads an image file: PNG, JPEG, WebP, GIF, BMP or TIFF.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/inputs", tag = "jobs", request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 201, body = InputView))))]
pub(crate) async fn upload(
    State(intake): State<Intake>,
    caller: Caller,
    body: RequestBody,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let id = intake.store_input(&body.bytes, "image", &caller)?;
        let size = kiln_image::dimensions("image", &body.bytes);
        let (width, height) = size.map_err(JobError::from)?;
        let (recipe, recipe_error) = match kiln_image::read_recipe(&body.bytes) {
            Ok(text) => (text.is_some(), None),
            Err(kiln_image::Error::Text { .. }) => (false, Some(UNREADABLE.to_owned())),
            // Programs write what they like behind the pixels.
            Err(_) => (false, None),
        };
        let location = format!("/v1/inputs/{id}");
        let response = json(StatusCode::CREATED, &InputView { id, width, height, recipe, recipe_error });
        Ok(with_location(response, &location))
    })
    .await
}

/// Returns the file of an uploaded image.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/inputs/{id}", tag = "jobs", params(("id" = String, Path)), responses((status = 200, description = "The file", content_type = "application/octet-stream"))))]
pub(crate) async fn file(
    State(intake): State<Intake>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let missing = || ApiError::not_found("input", &id);
        let path = intake.input_path(&id, &caller)?.ok_or_else(missing)?;
        // Not a media type a browser would run; `<img>` shows it all the same.
        let etag = Some(ETag::of_name(&id));
        let response = file_response(&path, "application/octet-stream", etag, &headers);
        response.map(immutable).map_err(|_| missing())
    })
    .await
}

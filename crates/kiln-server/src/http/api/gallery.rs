//! The gallery API: generated images, their files and thumbnails.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::conditional::ETag;
use super::error::ApiError;
use super::file::{bytes_response, file_response};
use super::image_view::{ImageView, shrink};
use super::{Caller, Path, Query, checked_limit, immutable, json, response, run_blocking};
use crate::jobs::intake::Intake;
use crate::jobs::store::{FileKind, ImageQuery, ImageRow, thumbnail_file};

/// Maximum bytes of the words of a search: all prompts are compared with them.
const MAX_SEARCH: usize = 256;

/// The parameters of the list of images.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub(crate) struct ImageListParams {
    /// Words that all occur in the prompt, the model's name or the seed.
    #[cfg_attr(feature = "schema", param(max_length = 256))]
    search: Option<String>,
    /// Only images older than the one with this id, which must exist.
    before: Option<String>,
    /// Only favourites.
    favourite: Option<bool>,
    /// The images in the trash, instead of the others.
    trash: Option<bool>,
    /// Maximum number of images; 40 by default.
    #[cfg_attr(feature = "schema", param(minimum = 1, maximum = 200, value_type = Option<u32>))]
    limit: Option<i64>,
}

/// A list of images.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ImageList {
    /// The images, newest first.
    data: Vec<ImageView>,
    /// Whether there are older images.
    more: bool,
}

/// Lists generated images, newest first.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/images", tag = "gallery", params(ImageListParams), responses((status = 200, body = ImageList))))]
pub(crate) async fn list(
    State(intake): State<Intake>,
    caller: Caller,
    Query(params): Query<ImageListParams>,
) -> Result<Response, ApiError> {
    let limit = checked_limit(params.limit, 40, 200)?;
    let words = params.search.unwrap_or_default();
    if words.len() > MAX_SEARCH {
        let message = format!("search has {} bytes, the limit is {MAX_SEARCH}", words.len());
        return Err(ApiError::invalid(message).param("search"));
    }
    let (favourites, trash) = (params.favourite == Some(true), params.trash == Some(true));
    let client = caller.only().map(str::to_owned);
    let query = ImageQuery { words, before: params.before, favourites, trash, limit, client };
    let (rows, more) = run_blocking(move || {
        if let Some(before) = &query.before {
            // Otherwise a list would end at an image that was deleted meanwhile.
            intake.image(before, &caller)?.ok_or_else(|| ApiError::not_found("image", before))?;
        }
        Ok(intake.store.search(&query)?)
    })
    .await?;
    Ok(json(StatusCode::OK, &ImageList { data: rows.into_iter().map(ImageView::from).collect(), more }))
}

/// An image that the caller may see.
async fn find(intake: &Intake, id: String, caller: Caller) -> Result<ImageRow, ApiError> {
    let intake = intake.clone();
    run_blocking(move || intake.image(&id, &caller)?.ok_or_else(|| ApiError::not_found("image", &id))).await
}

/// Returns an image's metadata.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/images/{id}", tag = "gallery", params(("id" = String, Path)), responses((status = 200, body = ImageView))))]
pub(crate) async fn details(
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &ImageView::from(find(&intake, id, caller).await?)))
}

/// Returns an image's recipe, as `kiln info` shows it.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/images/{id}/recipe", tag = "gallery", params(("id" = String, Path)), responses((status = 200, description = "The recipe", content_type = "application/json"))))]
pub(crate) async fn recipe(
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let row = find(&intake, id, caller).await?;
    Ok(response(StatusCode::OK, "application/json", row.recipe.into()))
}

/// Deletes an image for good. `PATCH /v1/images` moves images to the trash instead.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/images/{id}", tag = "gallery", params(("id" = String, Path)), responses((status = 204, description = "Deleted"))))]
pub(crate) async fn delete(
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let found = intake.image(&id, &caller)?.is_some() && intake.keeping.delete_image(&id)?;
        found.then_some(()).ok_or_else(|| ApiError::not_found("image", &id))
    })
    .await?;
    Ok(response(StatusCode::NO_CONTENT, "text/plain", bytes::Bytes::new()))
}

/// Returns an image's file.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/images/{id}/file", tag = "gallery", params(("id" = String, Path)), responses((status = 200, description = "The file", content_type = "image/*"))))]
pub(crate) async fn file(
    State(intake): State<Intake>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let row = find(&intake, id, caller).await?;
    let media_type = row.request.encoding().format.media_type();
    let response = run_blocking(move || {
        let missing = || ApiError::not_found("file of image", &row.id);
        let path = intake.files.path(FileKind::Image, &row.file)?.ok_or_else(missing)?;
        let etag = Some(ETag::of_name(&row.id));
        file_response(&path, media_type, etag, &headers).map(immutable).map_err(|_| missing())
    });
    response.await
}

/// Returns a thumbnail of an image as JPEG.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/images/{id}/thumbnail", tag = "gallery", params(("id" = String, Path)), responses((status = 200, description = "The file", content_type = "image/jpeg"))))]
pub(crate) async fn thumbnail(
    State(intake): State<Intake>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let row = find(&intake, id, caller).await?;
    let bytes = run_blocking(move || load_thumbnail(&intake, &row)).await?;
    Ok(immutable(bytes_response(bytes.into(), "image/jpeg", &headers)))
}

/// Reads the thumbnail, or creates it at the first request.
fn load_thumbnail(intake: &Intake, row: &ImageRow) -> Result<Vec<u8>, ApiError> {
    let name = thumbnail_file(&row.file);
    if let Ok(bytes) = std::fs::read(intake.store.image_path(&name)) {
        return Ok(bytes);
    }
    let unreadable = |_: std::io::Error| ApiError::not_found("file of image", &row.id);
    let path = intake.files.path(FileKind::Image, &row.file)?;
    let path = path.ok_or_else(|| ApiError::not_found("file of image", &row.id))?;
    let bytes = std::fs::read(path).map_err(unreadable)?;
    let bytes = shrink(intake, &row.id, &bytes, Some(&row.request))?;
    // If it can't be written, it is created again next time.
    let _ = intake.store.write_image(&name, &bytes);
    Ok(bytes)
}

//! The gallery: images that were made, their files, and thumbnails.

use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use kiln_image::{Encoding, Filter};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::error::{ApiError, ErrorBody};
use super::{answer, aside, json};
use crate::Server;
use crate::generator::JobError;
use crate::store::{PictureRow, Search, thumbnail};

/// The longest side of a thumbnail.
const SMALL: u32 = 320;

/// An image and its addresses.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct PictureView {
    /// What is known of it.
    #[serde(flatten)]
    row: PictureRow,
    /// Its file.
    url: String,
    /// A small JPEG of it.
    thumbnail: String,
}

impl From<PictureRow> for PictureView {
    fn from(row: PictureRow) -> PictureView {
        let url = format!("/v1/pictures/{}/file", row.id);
        PictureView { thumbnail: format!("/v1/pictures/{}/thumbnail", row.id), url, row }
    }
}

/// Which images.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Wanted {
    /// Words that all occur in the prompt, the model's name or the seed.
    search: Option<String>,
    /// Only images older than this one.
    before: Option<String>,
    /// How many at most.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
}

/// A list of images.
#[derive(Serialize, ToSchema)]
pub(crate) struct PictureList {
    /// Newest first.
    data: Vec<PictureView>,
    /// Whether there are older ones.
    more: bool,
}

/// Images that were made, newest first.
#[utoipa::path(get, path = "/v1/pictures", tag = "gallery", params(Wanted), responses(
    (status = 200, body = PictureList),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn list(
    State(server): State<Server>,
    Query(wanted): Query<Wanted>,
) -> Result<Response, ApiError> {
    let limit = wanted.limit.unwrap_or(40).clamp(1, 200);
    let words = wanted.search.unwrap_or_default();
    let search = Search { words, before: wanted.before, most: limit + 1 };
    let mut rows = server.store.search(&search)?;
    let more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    Ok(json(StatusCode::OK, &PictureList { data: rows.into_iter().map(PictureView::from).collect(), more }))
}

fn find(server: &Server, id: &str) -> Result<PictureRow, ApiError> {
    server.store.picture(id)?.ok_or_else(|| ApiError::not_found("picture", id))
}

/// What is known of an image.
#[utoipa::path(get, path = "/v1/pictures/{id}", tag = "gallery", params(("id" = String, Path)), responses(
    (status = 200, body = PictureView),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn one(State(server): State<Server>, Path(id): Path<String>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &PictureView::from(find(&server, &id)?)))
}

/// How an image was made, as `kiln info` shows it.
#[utoipa::path(get, path = "/v1/pictures/{id}/recipe", tag = "gallery", params(("id" = String, Path)), responses(
    (status = 200, description = "The recipe", content_type = "application/json"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn recipe(
    State(server): State<Server>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let row = find(&server, &id)?;
    Ok(answer(StatusCode::OK, "application/json", row.recipe.into()))
}

/// Removes an image for good.
#[utoipa::path(delete, path = "/v1/pictures/{id}", tag = "gallery", params(("id" = String, Path)), responses(
    (status = 204, description = "It is gone"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn delete(
    State(server): State<Server>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if !aside(move || server.store.delete_picture(&id).map(|found| (found, id)).map_err(ApiError::from))
        .await?
        .0
    {
        return Err(ApiError::not_found("picture", "of that name"));
    }
    Ok(answer(StatusCode::NO_CONTENT, "text/plain", bytes::Bytes::new()))
}

/// An image's file.
#[utoipa::path(get, path = "/v1/pictures/{id}/file", tag = "gallery", params(("id" = String, Path)), responses(
    (status = 200, description = "The file", content_type = "image/*"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn file(State(server): State<Server>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let row = find(&server, &id)?;
    let media_type = row.request.encoding().format.media_type();
    let bytes = aside(move || {
        std::fs::read(server.store.picture_path(&row.file))
            .map_err(|_| ApiError::not_found("file of picture", &row.id))
    });
    Ok(lasting(answer(StatusCode::OK, media_type, bytes.await?.into())))
}

/// A small JPEG of an image.
#[utoipa::path(get, path = "/v1/pictures/{id}/thumbnail", tag = "gallery", params(("id" = String, Path)), responses(
    (status = 200, description = "The file", content_type = "image/jpeg"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn small(
    State(server): State<Server>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let row = find(&server, &id)?;
    let bytes = aside(move || make_small(&server, &row)).await?;
    Ok(lasting(answer(StatusCode::OK, "image/jpeg", bytes.into())))
}

/// Made when it is first asked for.
fn make_small(server: &Server, row: &PictureRow) -> Result<Vec<u8>, ApiError> {
    let name = thumbnail(&row.file);
    if let Ok(bytes) = std::fs::read(server.store.picture_path(&name)) {
        return Ok(bytes);
    }
    let unreadable = |_: std::io::Error| ApiError::not_found("file of picture", &row.id);
    let bytes = std::fs::read(server.store.picture_path(&row.file)).map_err(unreadable)?;
    let failed = |error: kiln_image::Error| ApiError::from(JobError::server("encoding", error.to_string()));
    let picture = kiln_image::from_bytes(&row.id, &bytes).map_err(failed)?;
    let longest = picture.width().max(picture.height()).max(SMALL);
    let side = |side: u32| (side * SMALL / longest).max(1);
    let small = kiln_image::resize(&picture, side(picture.width()), side(picture.height()), Filter::Bicubic);
    let encoding = Encoding { quality: Some(85), ..kiln_image::Format::Jpeg.into() };
    let bytes = kiln_image::encode_as(&small, encoding, None).map_err(failed)?;
    // Without room to keep it, it is made again next time.
    let _ = server.store.write_picture(&name, &bytes);
    Ok(bytes)
}

/// An image never changes under its name.
fn lasting(mut response: Response) -> Response {
    let forever = HeaderValue::from_static("private, max-age=31536000, immutable");
    response.headers_mut().insert(header::CACHE_CONTROL, forever);
    response
}

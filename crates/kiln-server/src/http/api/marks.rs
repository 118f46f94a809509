//! Marks on images: favourites, and the trash with undo.

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::body::Json;
use super::error::ApiError;
use super::image_view::ImageView;
use super::{Caller, reply};
use crate::jobs::intake::Intake;
use crate::jobs::store::Marks;

/// Maximum number of images of one request.
const MAX_IMAGES: usize = 1000;

/// Images and the changes of their marks.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct MarkRequest {
    /// The ids of the images.
    ids: Vec<String>,
    /// Whether they are favourites; unchanged if absent.
    favourite: Option<bool>,
    /// Whether they are in the trash, which is emptied after a week; unchanged if absent.
    trash: Option<bool>,
}

/// The images after the change.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct MarkedImages {
    /// The images, in the order of the request.
    data: Vec<ImageView>,
}

/// Marks images as favourites, or moves them to the trash and back. Changes all of them or none.
#[cfg_attr(feature = "schema", utoipa::path(patch, path = "/v1/images", tag = "gallery", request_body = MarkRequest, responses(
    (status = 200, description = "The changed images", body = MarkedImages),
    (status = "4XX", description = "Not changed", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn update(
    State(intake): State<Intake>,
    caller: Caller,
    Json(request, _permit): Json<MarkRequest>,
) -> Result<Response, ApiError> {
    let MarkRequest { ids, favourite, trash } = request;
    if ids.len() > MAX_IMAGES {
        let message = format!("the request names {} images, the limit is {MAX_IMAGES}", ids.len());
        return Err(ApiError::invalid(message));
    }
    reply(move || {
        for id in &ids {
            intake.image(id, &caller)?.ok_or_else(|| ApiError::not_found("image", id))?;
        }
        if let Some(missing) = intake.keeping.mark(&ids, Marks { favourite, trash })? {
            return Err(ApiError::not_found("image", &missing));
        }
        let mut data = Vec::with_capacity(ids.len());
        for id in &ids {
            data.extend(intake.store.image(id)?.map(ImageView::from));
        }
        Ok(MarkedImages { data })
    })
    .await
}

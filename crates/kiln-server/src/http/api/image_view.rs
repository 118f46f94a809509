//! A generated image as clients see it, and its thumbnail.

use kiln_engine::Request;
use kiln_image::{Encoding, Filter};
use serde::Serialize;

use super::error::ApiError;
use crate::jobs::Jobs;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::store::ImageRow;

/// The longest side of a thumbnail, in pixels.
const THUMBNAIL_SIDE: u32 = 320;

/// A generated image and its URLs.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ImageView {
    /// The image.
    #[serde(flatten)]
    row: ImageRow,
    /// The URL of its file.
    url: String,
    /// The URL of its thumbnail, a JPEG.
    thumbnail: String,
}

impl From<ImageRow> for ImageView {
    fn from(row: ImageRow) -> ImageView {
        let url = format!("/v1/images/{}/file", row.id);
        ImageView { thumbnail: format!("/v1/images/{}/thumbnail", row.id), url, row }
    }
}

/// A thumbnail of an image file, as JPEG; with a mark if this request generated it.
pub(crate) fn shrink(
    jobs: &Jobs,
    name: &str,
    bytes: &[u8],
    request: Option<&Request>,
) -> Result<Vec<u8>, ApiError> {
    let failed =
        |error: kiln_image::Error| ApiError::from(JobError::new(ErrorCode::Encoding, error.to_string()));
    let memory = kiln_image::decoding_bytes(name, bytes).map_err(failed)?;
    let busy = |_| ApiError::from(JobError::new(ErrorCode::Busy, "too many images are being decoded"));
    let _memory = jobs.decode_budget.reserve(memory).map_err(busy)?;
    let image = kiln_image::from_bytes(name, bytes).map_err(failed)?;
    let longest = image.width().max(image.height()).max(THUMBNAIL_SIDE);
    let side = |side: u32| (side * THUMBNAIL_SIDE / longest).max(1);
    let small = kiln_image::resize(&image, side(image.width()), side(image.height()), Filter::Bicubic);
    let encoding = Encoding { quality: Some(85), ..kiln_image::Format::Jpeg.into() };
    match request {
        None => kiln_image::encode_with(&small, encoding, None).map_err(failed),
        Some(request) => {
            jobs.encode_preview(&small, encoding, request).map_err(|error| JobError::of_file(&error).into())
        }
    }
}

//! What is known about LoRAs: trigger words and previews.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::error::ApiError;
use super::gallery::shrink;
use super::{Query, json, response, run_blocking};
use crate::Server;

/// A LoRA.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct LoraView {
    /// Its name for requests.
    name: String,
    /// Words that it was trained with and that belong into a prompt.
    triggers: Vec<String>,
    /// The URL of an image that shows what it does, a JPEG.
    preview: Option<String>,
}

/// A list of LoRAs.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct LoraList {
    /// The LoRAs.
    data: Vec<LoraView>,
}

/// Lists the LoRAs with their trigger words and previews.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/loras/details", tag = "server", responses((status = 200, description = "The LoRAs", body = LoraList))))]
pub(crate) async fn details(State(server): State<Server>) -> Result<Response, ApiError> {
    let list = run_blocking(move || {
        let view = |lora: crate::LoraInfo| LoraView {
            preview: lora.has_preview.then(|| format!("/v1/loras/preview?name={}", encode(&lora.name))),
            name: lora.name,
            triggers: lora.triggers,
        };
        let data = server.catalogue.lora_details().into_iter().map(view).collect();
        Ok::<_, ApiError>(LoraList { data })
    });
    Ok(json(StatusCode::OK, &list.await?))
}

/// The parameters of a LoRA's preview.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub(crate) struct PreviewParams {
    /// The name of the LoRA.
    name: String,
}

/// Returns a small image that shows what a LoRA does, as JPEG.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/loras/preview", tag = "server", params(PreviewParams), responses(
    (status = 200, description = "The file", content_type = "image/jpeg"),
    (status = "4XX", description = "No such LoRA, or it has no preview", body = crate::api::error::ErrorBody),
)))]
pub(crate) async fn preview(
    State(server): State<Server>,
    Query(PreviewParams { name }): Query<PreviewParams>,
) -> Result<Response, ApiError> {
    let bytes = run_blocking(move || {
        let missing = || ApiError::not_found("preview of LoRA", &name);
        let bytes = server.catalogue.lora_preview(&name).ok_or_else(missing)?;
        shrink(&server, &name, &bytes)
    });
    Ok(response(StatusCode::OK, "image/jpeg", bytes.await?.into()))
}

/// Escapes a name for the query of a URL.
fn encode(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    name.bytes().map(escape).collect()
}

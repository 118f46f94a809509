//! LoRAs: trigger words, previews and files. Those that trainings have written can be deleted.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::error::ApiError;
use super::file::{bytes_response, file_response};
use super::image_view::shrink;
use super::{Caller, Path, Query, cached_while_valid, reply, response, run_blocking, trainings};
use crate::jobs::Jobs;
use crate::jobs::error::ErrorCode;
use crate::jobs::trainings::Trainings;

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
    /// The URL of its file, if the caller may download it.
    file: Option<String>,
    /// Whether the caller may delete it: a training of its own has written it.
    deletable: bool,
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
pub(crate) async fn details(
    State(jobs): State<Jobs>,
    State(trainings): State<Option<Arc<Trainings>>>,
    caller: Caller,
) -> Result<Response, ApiError> {
    reply(move || {
        let loras = jobs.catalogue.lora_details();
        // A fleet's gateway has none of the files.
        let has_files = loras.first().is_some_and(|lora| jobs.catalogue.lora_file(&lora.name).is_some());
        let view = |lora: crate::LoraInfo| LoraView {
            preview: lora.has_preview.then(|| format!("/v1/loras/preview?name={}", encode(&lora.name))),
            file: (has_files && may_download(&trainings, &caller, &lora.name).is_ok())
                .then(|| format!("/v1/loras/{}/file", encode(&lora.name))),
            deletable: may_delete(&trainings, &caller, &lora.name).is_ok(),
            name: lora.name,
            triggers: lora.triggers,
        };
        let data = loras.into_iter().map(view).collect();
        Ok(LoraList { data })
    })
    .await
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
    (status = "4XX", description = "No such LoRA, or it has no preview", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn preview(
    State(jobs): State<Jobs>,
    headers: HeaderMap,
    Query(PreviewParams { name }): Query<PreviewParams>,
) -> Result<Response, ApiError> {
    let bytes = run_blocking(move || {
        let missing = || ApiError::not_found("preview of LoRA", &name);
        let bytes = jobs.catalogue.lora_preview(&name).ok_or_else(missing)?;
        shrink(&jobs, &name, &bytes, None)
    });
    Ok(cached_while_valid(bytes_response(bytes.await?.into(), "image/jpeg", &headers)))
}

/// Returns the file of a LoRA, to its owner and to admins. Parts can be asked for with `Range`.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/loras/{name}/file", tag = "server", params(("name" = String, Path)), responses(
    (status = 200, description = "The file, in safetensors' format", content_type = "application/octet-stream"),
    (status = 403, description = "The LoRA is another client's", body = crate::http::api::error::ErrorBody),
    (status = "4XX", description = "No such LoRA, or its file is not on this machine", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn file(
    State(jobs): State<Jobs>,
    State(trainings): State<Option<Arc<Trainings>>>,
    caller: Caller,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        find(&jobs, &name)?;
        may_download(&trainings, &caller, &name)?;
        let missing = || ApiError::not_found("file of LoRA", &name);
        let path = jobs.catalogue.lora_file(&name).ok_or_else(missing)?;
        let response = file_response(&path, "application/octet-stream", None, &headers);
        let mut response = response.map(cached_while_valid).map_err(|_| missing())?;
        response.headers_mut().insert(header::CONTENT_DISPOSITION, attachment(&name));
        Ok(response)
    })
    .await
}

/// Deletes a LoRA that a training on this server has written.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/loras/{name}", tag = "server", params(("name" = String, Path)), responses(
    (status = 204, description = "Deleted"),
    (status = 403, description = "The LoRA is another client's, or no training on this server has written it", body = crate::http::api::error::ErrorBody),
    (status = "4XX", description = "No such LoRA", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn delete(
    State(jobs): State<Jobs>,
    State(trainings): State<Option<Arc<Trainings>>>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        find(&jobs, &name)?;
        let failed = |error: std::io::Error| {
            tracing::error!(%error, lora = name, "failed to delete a LoRA");
            ApiError::new(ErrorCode::Storage, "the LoRA can't be deleted")
        };
        let trainings = may_delete(&trainings, &caller, &name)?;
        if !trainings.delete_lora(&name).map_err(failed)? {
            return Err(ApiError::not_found("LoRA", &name));
        }
        tracing::info!(lora = name, client = caller.client, "LoRA deleted");
        Ok(())
    })
    .await?;
    Ok(response(StatusCode::NO_CONTENT, "text/plain", bytes::Bytes::new()))
}

fn find(jobs: &Jobs, name: &str) -> Result<(), ApiError> {
    let is_listed = jobs.catalogue.loras().iter().any(|listed| listed == name);
    if is_listed { Ok(()) } else { Err(ApiError::not_found("LoRA", name)) }
}

/// Checks that the caller may have a LoRA's file: an admin any, others those that they have trained.
fn may_download(trainings: &Option<Arc<Trainings>>, caller: &Caller, name: &str) -> Result<(), ApiError> {
    if caller.admin {
        return Ok(());
    }
    let trainings = trainings::allowed(trainings, caller)?;
    let is_own = trainings.loras.owner(name).is_some_and(|owner| caller.sees(&owner));
    if is_own {
        Ok(())
    } else {
        Err(not_yours("only the key that trained this LoRA, and admins, may download it"))
    }
}

/// Checks that the caller may delete a LoRA: a training that it may see has written it.
fn may_delete<'t>(
    trainings: &'t Option<Arc<Trainings>>,
    caller: &Caller,
    name: &str,
) -> Result<&'t Trainings, ApiError> {
    let trainings: &Trainings = trainings::allowed(trainings, caller)?;
    match trainings.loras.owner(name) {
        Some(owner) if caller.sees(&owner) => Ok(trainings),
        Some(_) => Err(not_yours("only the key that trained this LoRA, and admins, may delete it")),
        None => {
            let message =
                "no training on this server has written this LoRA; its operator can remove the file";
            Err(ApiError::new(ErrorCode::NotTrainedHere, message))
        }
    }
}

fn not_yours(message: &str) -> ApiError {
    ApiError::new(ErrorCode::NotYours, message)
}

/// The header that names a downloaded LoRA, without its folder.
fn attachment(name: &str) -> HeaderValue {
    let name = name.rsplit('/').next().unwrap_or(name);
    let plain =
        |c: char| if c.is_ascii_alphanumeric() || matches!(c, ' ' | '.' | '-' | '_') { c } else { '_' };
    let ascii: String = name.chars().map(plain).collect();
    let value = format!(
        "attachment; filename=\"{ascii}.safetensors\"; filename*=UTF-8''{}.safetensors",
        encode(name)
    );
    HeaderValue::from_str(&value).unwrap_or(HeaderValue::from_static("attachment"))
}

/// Escapes a name for the path or the query of a URL.
fn encode(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    name.bytes().map(escape).collect()
}

//! Downloads of models that the catalogue offers.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::body::Json;
use super::error::ApiError;
use super::{Caller, Path, json, reply, run_blocking};
use crate::jobs::Jobs;
use crate::jobs::downloads::{Download, Downloads};
use crate::jobs::error::ErrorCode;
use crate::jobs::generator::{DownloadLicence, DownloadableModel};

/// Downloads, and models that can be downloaded.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct DownloadList {
    /// The downloads since the start of the server.
    data: Vec<Download>,
    /// The models that the caller can download; none where downloads are not allowed, or without an admin key.
    available: Vec<DownloadableModel>,
}

/// Lists downloads, and the models that can be downloaded.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/downloads", tag = "server", responses((status = 200, description = "The downloads", body = DownloadList))))]
pub(crate) async fn list(
    State(jobs): State<Jobs>,
    State(downloads): State<Arc<Downloads>>,
    caller: Caller,
) -> Result<Response, ApiError> {
    reply(move || {
        let available = if caller.admin { jobs.catalogue.downloadable() } else { Vec::new() };
        let data = downloads.all();
        Ok(DownloadList { data, available })
    })
    .await
}

/// A model to download.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct NewDownload {
    /// Its name, one of those that `GET /v1/downloads` offers.
    model: String,
    /// Whether the model's licence is accepted. Needed for a model that has one.
    #[serde(default)]
    accept_license: bool,
}

/// Downloads a model. Only one download runs at a time; one that was interrupted resumes.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/downloads", tag = "server", request_body = NewDownload, responses(
    (status = 202, description = "Started", body = DownloadList),
    (status = "4XX", description = "Not started", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn start(
    State(jobs): State<Jobs>,
    State(downloads): State<Arc<Downloads>>,
    caller: Caller,
    Json(NewDownload { model, accept_license }, _permit): Json<NewDownload>,
) -> Result<Response, ApiError> {
    caller.require_admin()?;
    let list = run_blocking(move || {
        let available = jobs.catalogue.downloadable();
        let Some(offered) = available.iter().find(|offered| offered.name == model) else {
            return Err(ApiError::not_found("model to download", &model));
        };
        if let Some(DownloadLicence { name, url }) = offered.licence.as_ref().filter(|_| !accept_license) {
            let message = format!(
                "`{model}` is under the {name} ({url}); read it and send `accept_license` to accept it"
            );
            return Err(ApiError::new(ErrorCode::LicenseNotAccepted, message));
        }
        downloads.start(&jobs, &model).map_err(|running| {
            let message = format!("`{running}` is being downloaded; wait for it, or cancel it");
            ApiError::new(ErrorCode::Busy, message).with_status(StatusCode::CONFLICT)
        })?;
        Ok(DownloadList { data: downloads.all(), available })
    });
    Ok(json(StatusCode::ACCEPTED, &list.await?))
}

/// Cancels a download. What is there is kept for the next one.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/downloads/{model}", tag = "server", params(("model" = String, Path)), responses(
    (status = 202, description = "Will stop", body = DownloadList),
    (status = "4XX", description = "Not being downloaded", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn cancel(
    State(jobs): State<Jobs>,
    State(downloads): State<Arc<Downloads>>,
    caller: Caller,
    Path(model): Path<String>,
) -> Result<Response, ApiError> {
    caller.require_admin()?;
    if !downloads.cancel(&model) {
        return Err(ApiError::not_found("running download of", &model));
    }
    let (data, available) = (downloads.all(), jobs.catalogue.downloadable());
    Ok(json(StatusCode::ACCEPTED, &DownloadList { data, available }))
}

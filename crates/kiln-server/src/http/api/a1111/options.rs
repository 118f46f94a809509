//! A1111's options: the model and the autoencoder of later requests.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kiln_base::lock;

use super::choice::{A1111Options, Choice, key_name};
use crate::http::api::body::Json;
use crate::http::api::error::ApiError;
use crate::http::api::fields::Fields;
use crate::http::api::{Caller, json};
use crate::jobs::Jobs;

/// Returns the supported options.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/options", tag = "a1111", responses((status = 200, description = "Options", body = Object))))]
pub(crate) async fn options(
    State(jobs): State<Jobs>,
    State(choices): State<Arc<A1111Options>>,
    caller: Caller,
) -> Response {
    let Choice { model, vae } = choices.of(&caller);
    // The model of requests that name none.
    let model = model.or_else(|| jobs.catalogue.default_model());
    let options = serde_json::json!({
        "sd_model_checkpoint": model.unwrap_or_default(),
        "sd_checkpoint_hash": "",
        "sd_vae": vae.as_deref().unwrap_or("Automatic"),
        "samples_format": "png",
        "CLIP_stop_at_last_layers": 1,
    });
    json(StatusCode::OK, &options)
}

/// Sets the model (`sd_model_checkpoint`) and the autoencoder (`sd_vae`) of later requests of this API. Other options are
/// ignored.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/options", tag = "a1111", request_body = Object, responses((status = 200, description = "Done"))))]
pub(crate) async fn set_options(
    State(jobs): State<Jobs>,
    State(choices): State<Arc<A1111Options>>,
    caller: Caller,
    Json(options, _): Json<Fields>,
) -> Result<Response, ApiError> {
    let choice = choices.choice(&jobs, &caller, &options);
    if let Some(model) = &choice.model {
        jobs.config.limits.check_model(model, &*jobs.catalogue, &jobs.config.model_aliases)?;
    }
    lock(&choices.0).insert(key_name(&caller).to_owned(), choice);
    Ok(json(StatusCode::OK, &Fields::new()))
}

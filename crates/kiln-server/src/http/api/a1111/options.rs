//! A1111's options: the model and the autoencoder of later requests.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kiln_base::lock;

use super::choice::key_name;
use crate::Server;
use crate::http::api::body::Json;
use crate::http::api::error::ApiError;
use crate::http::api::fields::Fields;
use crate::http::api::{Caller, json};

/// The model of requests that name none.
fn current_model(server: &Server, caller: &Caller) -> String {
    server.a1111.of(caller).model.or_else(|| server.catalogue.default_model()).unwrap_or_default()
}

/// Returns the supported options.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/options", tag = "a1111", responses((status = 200, description = "Options", body = Object))))]
pub(crate) async fn options(State(server): State<Server>, caller: Caller) -> Response {
    let vae = server.a1111.of(&caller).vae;
    let options = serde_json::json!({
        "sd_model_checkpoint": current_model(&server, &caller),
        "sd_checkpoint_hash": "",
        "sd_vae": vae.as_deref().unwrap_or("Automatic"),
        "samples_format": "png",
        "CLIP_stop_at_last_layers": 1,
    });
    json(StatusCode::OK, &options)
}

/// Sets the model (`sd_model_checkpoint`) and the autoencoder (`sd_vae`) of later requests of this API. Other options are
/// ignored.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/options", tag = "a1111", request_body = Object, responses(
    (status = 200, description = "Done"),
    (status = "4XX", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn set_options(
    State(server): State<Server>,
    caller: Caller,
    Json(options, _): Json<Fields>,
) -> Result<Response, ApiError> {
    let choice = server.a1111.choice(&server, &caller, &options);
    if let Some(model) = &choice.model {
        server.config.limits.check_model(model, &*server.catalogue, &server.config.model_aliases)?;
    }
    lock(&server.a1111.0).insert(key_name(&caller).to_owned(), choice);
    Ok(json(StatusCode::OK, &Fields::new()))
}

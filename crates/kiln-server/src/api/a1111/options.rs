//! A1111's options: the model and the autoencoder of later requests.

use std::collections::HashMap;
use std::sync::Mutex;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kiln_base::lock;
use serde_json::Value;

use crate::Server;
use crate::api::body::Json;
use crate::api::error::ApiError;
use crate::api::fields::Fields;
use crate::api::{Caller, json};

/// A model and an autoencoder; `None` for the server's and the model's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    pub(crate) model: Option<String>,
    pub(crate) vae: Option<String>,
}

/// The choice that `POST /sdapi/v1/options` made, for requests of this API that make none. Lasts until the server stops.
#[derive(Default)]
pub(crate) struct A1111Options(Mutex<HashMap<String, Choice>>);

impl A1111Options {
    /// The choice of this caller's key.
    fn of(&self, caller: &Caller) -> Choice {
        lock(&self.0).get(key_name(caller)).cloned().unwrap_or_default()
    }

    /// The choice for a request with these settings.
    pub(crate) fn choice(&self, server: &Server, caller: &Caller, settings: &Fields) -> Choice {
        let current = self.of(caller);
        let text = |name: &str| settings.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let model = text("sd_model_checkpoint").map(|title| model_name(server, title)).or(current.model);
        let vae = match text("sd_vae") {
            Some(title) => vae_name(server, title),
            None => current.vae,
        };
        Choice { model, vae }
    }
}

/// The name of the model with this title. A1111's titles have an extension and a hash: `klein.safetensors [0123abcdef]`.
/// The name of a caller's key; without keys all callers share one choice.
fn key_name(caller: &Caller) -> &str {
    caller.key.as_ref().map_or("", |key| &key.name)
}

fn model_name(server: &Server, title: &str) -> String {
    let known = |name: &str| {
        let is_alias = server.config.model_aliases.iter().any(|(alias, _)| alias == name);
        is_alias || server.catalogue.models().iter().any(|model| model.name == name)
    };
    let bare = title.split(" [").next().unwrap_or(title).trim();
    let stem = bare.strip_suffix(".safetensors").or_else(|| bare.strip_suffix(".gguf")).unwrap_or(bare);
    let name = [title, bare, stem].into_iter().find(|name| known(name));
    // An unknown name is refused later, with the list of known ones.
    name.unwrap_or(title).to_owned()
}

/// The name of an autoencoder; `None` for those that mean the model's own, as all that this server lacks do.
fn vae_name(server: &Server, title: &str) -> Option<String> {
    let stem = title.strip_suffix(".safetensors").unwrap_or(title);
    server.catalogue.vaes().into_iter().find(|name| name == stem)
}

/// The model of requests that name none.
fn current_model(server: &Server, caller: &Caller) -> String {
    let chosen = server.a1111.of(caller).model;
    let default = || server.catalogue.models().into_iter().find(|m| m.default).map(|m| m.name);
    chosen.or_else(default).unwrap_or_default()
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
    (status = "4XX", body = crate::api::error::ErrorBody),
)))]
pub(crate) async fn set_options(
    State(server): State<Server>,
    caller: Caller,
    Json(options, _): Json<Fields>,
) -> Result<Response, ApiError> {
    let choice = server.a1111.choice(&server, &caller, &options);
    if let Some(model) = &choice.model {
        server.config.limits.check_model(model, &server)?;
    }
    lock(&server.a1111.0).insert(key_name(&caller).to_owned(), choice);
    Ok(json(StatusCode::OK, &Fields::new()))
}

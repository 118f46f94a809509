//! Lists that clients of A1111's API ask for when they start.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kiln_engine::ScheduleKind;
use serde_json::{Value, json as value};

use crate::http::api::fields::Fields;
use crate::http::api::json;
use crate::jobs::Jobs;

/// The one sampler: FLUX models are integrated with Euler steps.
pub(crate) const SAMPLER: &str = "Euler";

/// The schedules by name. Clients send `Automatic` for the model's own.
const SCHEDULES: [(&str, &str, ScheduleKind); 3] = [
    ("automatic", "Automatic", ScheduleKind::Shifted),
    ("shifted", "Shifted", ScheduleKind::Shifted),
    ("power", "Power", ScheduleKind::Power),
];

/// The schedule of this name, if it is one of ours.
pub(crate) fn schedule(name: Option<&str>) -> Option<ScheduleKind> {
    let is_named =
        |(name, label, _): &&(&str, &str, ScheduleKind), given: &str| *name == given || *label == given;
    name.and_then(|given| SCHEDULES.iter().find(|known| is_named(known, given))).map(|(_, _, kind)| *kind)
}

fn list(entries: &[Value]) -> Response {
    json(StatusCode::OK, &entries)
}

/// Lists the samplers.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/samplers", tag = "a1111", responses((status = 200, description = "Samplers", body = Vec<Object>))))]
pub(crate) async fn samplers() -> Response {
    list(&[value!({ "name": SAMPLER, "aliases": ["euler"], "options": {} })])
}

/// Lists the schedules of noise levels.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/schedulers", tag = "a1111", responses((status = 200, description = "Schedules", body = Vec<Object>))))]
pub(crate) async fn schedulers() -> Response {
    let entry = |(name, label, _): &(&str, &str, ScheduleKind)| {
        value!({
            "name": name, "label": label, "aliases": null, "default_rho": 2.0, "need_inner_model": false,
        })
    };
    list(&SCHEDULES.iter().map(entry).collect::<Vec<_>>())
}

/// Lists the upscalers: there are none.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/upscalers", tag = "a1111", responses((status = 200, description = "Upscalers", body = Vec<Object>))))]
pub(crate) async fn upscalers() -> Response {
    list(&[value!({ "name": "None", "model_name": null, "model_path": null, "model_url": null, "scale": 1 })])
}

/// Lists the modes of latent upscaling: there are none.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/latent-upscale-modes", tag = "a1111", responses((status = 200, description = "Modes", body = Vec<Object>))))]
pub(crate) async fn latent_upscale_modes() -> Response {
    list(&[])
}

/// Lists the models.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/sd-models", tag = "a1111", responses((status = 200, description = "Models", body = Vec<Object>))))]
pub(crate) async fn models(State(jobs): State<Jobs>) -> Response {
    let entry = |name: String| {
        value!({
            "title": name, "model_name": name, "hash": null, "sha256": null, "filename": name, "config": null,
        })
    };
    list(&jobs.catalogue.models().into_iter().map(|m| entry(m.name)).collect::<Vec<_>>())
}

/// Lists the autoencoders.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/sd-vae", tag = "a1111", responses((status = 200, description = "Autoencoders", body = Vec<Object>))))]
pub(crate) async fn vaes(State(jobs): State<Jobs>) -> Response {
    let entry = |name: String| value!({ "model_name": name, "filename": name });
    list(&jobs.catalogue.vaes().into_iter().map(entry).collect::<Vec<_>>())
}

/// Lists the LoRAs.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/loras", tag = "a1111", responses((status = 200, description = "LoRAs", body = Vec<Object>))))]
pub(crate) async fn loras(State(jobs): State<Jobs>) -> Response {
    let entry = |name: String| value!({ "name": name, "alias": name, "path": name, "metadata": {} });
    list(&jobs.catalogue.loras().into_iter().map(entry).collect::<Vec<_>>())
}

/// Lists the scripts: there are none.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/scripts", tag = "a1111", responses((status = 200, description = "Scripts", body = Object))))]
pub(crate) async fn scripts() -> Response {
    json(StatusCode::OK, &value!({ "txt2img": [], "img2img": [] }))
}

/// Returns the flags that A1111 was started with: for this server, that its API is on.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/cmd-flags", tag = "a1111", responses((status = 200, description = "Flags", body = Object))))]
pub(crate) async fn cmd_flags() -> Response {
    json(StatusCode::OK, &value!({ "api": true, "nowebui": false, "no_gradio_queue": true }))
}

/// Looks for new models.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/refresh-checkpoints", tag = "a1111", responses((status = 200, description = "Done"))))]
pub(crate) async fn refresh_checkpoints(State(jobs): State<Jobs>) -> Response {
    jobs.catalogue.refresh();
    json(StatusCode::OK, &Fields::new())
}

/// Looks for new LoRAs.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/refresh-loras", tag = "a1111", responses((status = 200, description = "Done"))))]
pub(crate) async fn refresh_loras(jobs: State<Jobs>) -> Response {
    refresh_checkpoints(jobs).await
}

/// Looks for new autoencoders.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/refresh-vae", tag = "a1111", responses((status = 200, description = "Done"))))]
pub(crate) async fn refresh_vaes(jobs: State<Jobs>) -> Response {
    refresh_checkpoints(jobs).await
}

//! The part of the API of A1111's web UI that other tools use.

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_engine::{LoraRef, Request};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::body::{BodyPermit, Json};
use super::error::{ApiError, ErrorBody};
use super::fields::{Fields, parse_request};
use super::{Client, json, submit_attached, wait_until_ended};
use crate::Server;
use crate::generator::ErrorKind;
use crate::live::{Api, LiveJob};
use crate::store::JobState;

/// A1111's default for `denoising_strength`.
const DEFAULT_STRENGTH: f64 = 0.75;
/// Fields of Kiln's request that `override_settings` may hold. All other settings are A1111's and ignored.
const OWN_SETTINGS: [&str; 6] = ["max_tokens", "rho", "rng", "schedule", "sigmas", "vae"];

/// A request in A1111's format. Unsupported fields are ignored, as clients send many.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct Txt2Img {
    /// The prompt; `<lora:NAME:WEIGHT>` in it adds a LoRA.
    prompt: String,
    /// The negative prompt.
    negative_prompt: Option<String>,
    /// The seed; -1 for a random one.
    seed: Option<i64>,
    /// Number of steps.
    steps: Option<u32>,
    /// Guidance.
    cfg_scale: Option<f32>,
    /// Width in pixels.
    width: Option<u32>,
    /// Height in pixels.
    height: Option<u32>,
    /// Images per iteration.
    batch_size: Option<u32>,
    /// Number of iterations; the job has `batch_size` × `n_iter` images.
    n_iter: Option<u32>,
    /// `sd_model_checkpoint` selects the model; `max_tokens`, `rho`, `rng`, `schedule`, `sigmas` and `vae` are as in `/v1/jobs`.
    #[schema(value_type = Option<Object>)]
    override_settings: Option<Fields>,
    /// The initial image as base64; only the first of the list is used.
    #[serde(skip_serializing)]
    init_images: Vec<String>,
    /// The mask as base64: white areas are regenerated.
    #[serde(skip_serializing)]
    mask: Option<String>,
    /// How much to change the initial image: 0 keeps it, 1 ignores it.
    denoising_strength: Option<f64>,
    /// Whether to crop to the surroundings of the mask.
    inpaint_full_res: Option<Value>,
    /// Pixels around the mask to include in the crop; 32 by default.
    inpaint_full_res_padding: Option<u32>,
}

/// Generated images in A1111's format.
#[derive(Serialize, ToSchema)]
pub(crate) struct Txt2ImgResponse {
    /// The files as base64.
    images: Vec<String>,
    /// The request.
    parameters: Txt2Img,
    /// Seeds, size, steps, model and prompt, as JSON in a string.
    info: String,
}

impl Txt2Img {
    fn request(&self) -> Result<Request, ApiError> {
        let (prompt, loras) = split_loras(&self.prompt);
        let settings = self.override_settings.iter().flatten();
        let own = settings.filter(|(name, _)| OWN_SETTINGS.contains(&name.as_str()));
        let own = parse_request(&own.map(|(name, value)| (name.clone(), value.clone())).collect())?;
        let model = self.override_settings.as_ref().and_then(|s| s.get("sd_model_checkpoint")?.as_str());
        let count = self.batch_size.unwrap_or(1).max(1).saturating_mul(self.n_iter.unwrap_or(1).max(1));
        let negative = self.negative_prompt.clone().filter(|text| !text.is_empty());
        Ok(Request {
            prompts: vec![prompt],
            negative_prompts: negative.into_iter().collect(),
            model: model.filter(|name| !name.is_empty()).map(Into::into),
            n: Some(count),
            width: self.width,
            height: self.height,
            steps: self.steps,
            guidance: self.cfg_scale,
            // -1 means random.
            seed: self.seed.and_then(|seed| u64::try_from(seed).ok()).into_iter().collect(),
            loras,
            ..own
        })
    }
}

/// Splits a prompt into its text and its `<lora:NAME:WEIGHT>` tags.
fn split_loras(prompt: &str) -> (String, Vec<LoraRef>) {
    let (mut words, mut loras, mut rest) = (String::new(), Vec::new(), prompt);
    while let Some((before, after)) = rest.split_once("<lora:") {
        let Some((inside, after)) = after.split_once('>') else { break };
        let (name, weight) = inside.split_once(':').unwrap_or((inside, "1"));
        let weight = weight.split(':').next().and_then(|w| w.trim().parse().ok()).unwrap_or(1.0);
        words += before;
        loras.push(LoraRef { path: name.trim().into(), weight, sha256: None });
        rest = after;
    }
    words += rest;
    (words.trim().to_owned(), loras)
}

/// Generates images from a prompt.
#[utoipa::path(post, path = "/sdapi/v1/txt2img", tag = "a1111", request_body = Txt2Img, responses(
    (status = 200, body = Txt2ImgResponse),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn txt2img(
    State(server): State<Server>,
    Client(client): Client,
    Json(body, permit): Json<Txt2Img>,
) -> Result<Response, ApiError> {
    let request = body.request()?;
    generate(server, client, body, request, permit).await
}

/// Generates images from an initial image, optionally inside a mask.
#[utoipa::path(post, path = "/sdapi/v1/img2img", tag = "a1111", request_body = Txt2Img, responses(
    (status = 200, body = Txt2ImgResponse),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn img2img(
    State(server): State<Server>,
    Client(client): Client,
    Json(mut body, permit): Json<Txt2Img>,
) -> Result<Response, ApiError> {
    let mut request = body.request()?;
    if body.init_images.is_empty() {
        return Err(ApiError::invalid("init_images is empty: img2img requires an initial image"));
    }
    request.init = Some(body.init_images.swap_remove(0).into());
    request.mask = body.mask.take().map(Into::into);
    request.strength = Some(body.denoising_strength.unwrap_or(DEFAULT_STRENGTH));
    let only_masked =
        matches!(&body.inpaint_full_res, Some(Value::Bool(true))) || body.inpaint_full_res == Some(1.into());
    if request.mask.is_some() && only_masked {
        request.mask_padding = Some(body.inpaint_full_res_padding.unwrap_or(32));
    }
    generate(server, client, body, request, permit).await
}

async fn generate(
    server: Server,
    client: String,
    body: Txt2Img,
    request: Request,
    permit: BodyPermit,
) -> Result<Response, ApiError> {
    let attached = submit_attached(&server, request, &client, Api::A1111).await?;
    drop(permit);
    let end = wait_until_ended(&attached).await;
    // An interrupted job returns the images it has.
    let interrupted = end.error.as_ref().is_some_and(|e| e.kind == ErrorKind::Cancelled);
    if let Some(error) = end.error.filter(|_| !interrupted) {
        return Err(error.into());
    }
    let seeds: Vec<u64> =
        end.images.iter().filter_map(|image| image.row.seed.as_ref()?.parse().ok()).collect();
    let (width, height) = end.images.first().map_or((0, 0), |image| (image.row.width, image.row.height));
    let info = serde_json::json!({
        "prompt": attached.live.request.prompts.first(),
        "negative_prompt": attached.live.request.negative_prompts.first(),
        "seed": seeds.first(),
        "all_seeds": seeds,
        "width": width,
        "height": height,
        "steps": end.progress.steps,
        "cfg_scale": attached.live.request.guidance,
        "sd_model_name": end.images.first().map(|image| &image.row.model),
        "interrupted": interrupted,
    });
    let images = end.images.iter().map(|image| BASE64_STANDARD.encode(&image.bytes)).collect();
    Ok(json(StatusCode::OK, &Txt2ImgResponse { images, parameters: body, info: info.to_string() }))
}

/// The progress of the running job, in A1111's format.
#[derive(Serialize, ToSchema)]
pub(crate) struct ProgressResponse {
    /// From 0 to 1.
    progress: f32,
    /// Estimated seconds left.
    eta_relative: f32,
    /// The job's id, steps and images.
    #[schema(value_type = Object)]
    state: Value,
    /// A preview as base64.
    current_image: Option<String>,
    /// The current phase.
    textinfo: Option<String>,
}

/// The parameters of a progress request.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ProgressParams {
    /// Whether to leave out the preview.
    skip_current_image: Option<bool>,
}

/// Returns the progress of the running job.
#[utoipa::path(get, path = "/sdapi/v1/progress", tag = "a1111", params(ProgressParams), responses(
    (status = 200, body = ProgressResponse),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn progress(State(server): State<Server>, Query(params): Query<ProgressParams>) -> Response {
    let running = server.active().into_iter().find(|live| live.state() == JobState::Running);
    let snapshot = running.as_ref().map(|live| live.snapshot()).unwrap_or_default();
    let with_preview = params.skip_current_image != Some(true);
    if let Some(live) = running.as_ref().filter(|_| with_preview) {
        live.poll_preview();
    }
    let image = snapshot
        .preview
        .as_ref()
        .filter(|_| with_preview)
        .and_then(|preview| kiln_image::encode(&preview.image, kiln_image::Format::Png, None).ok());
    let progress = &snapshot.progress;
    json(
        StatusCode::OK,
        &ProgressResponse {
            progress: progress.fraction,
            eta_relative: snapshot.time_left.unwrap_or(0.0),
            state: serde_json::json!({
                "skipped": false,
                "interrupted": false,
                "job": running.as_ref().map_or("", |live| &live.id),
                "job_count": i32::from(running.is_some()),
                "job_no": progress.image,
                "sampling_step": progress.step,
                "sampling_steps": progress.steps,
            }),
            current_image: image.map(|bytes| BASE64_STANDARD.encode(bytes)),
            textinfo: (snapshot.state == JobState::Running).then(|| progress.phase.name().to_owned()),
        },
    )
}

/// Cancels the running jobs that were submitted through this API.
#[utoipa::path(post, path = "/sdapi/v1/interrupt", tag = "a1111", responses((status = 200, description = "Done")))]
pub(crate) async fn interrupt(State(server): State<Server>) -> Response {
    let own = |live: &LiveJob| live.api == Api::A1111 && live.state() == JobState::Running;
    for live in server.active().iter().filter(|live| own(live)) {
        server.cancel(&live.id);
    }
    json(StatusCode::OK, &Fields::new())
}

fn default_model(server: &Server) -> String {
    let models = server.catalogue.models();
    models.into_iter().find(|m| m.default).map(|m| m.name).unwrap_or_default()
}

/// Returns the supported options.
#[utoipa::path(get, path = "/sdapi/v1/options", tag = "a1111", responses((status = 200, description = "Options", body = Object)))]
pub(crate) async fn options(State(server): State<Server>) -> Response {
    let options =
        serde_json::json!({ "sd_model_checkpoint": default_model(&server), "samples_format": "png" });
    json(StatusCode::OK, &options)
}

/// Sets options; only the current model is accepted, as other models are selected per request in `override_settings`.
#[utoipa::path(post, path = "/sdapi/v1/options", tag = "a1111", request_body = Object, responses(
    (status = 200, description = "Done"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn set_options(
    State(server): State<Server>,
    Json(options, _): Json<Fields>,
) -> Result<Response, ApiError> {
    let model = options.get("sd_model_checkpoint").and_then(Value::as_str).unwrap_or_default();
    if !model.is_empty() && model != default_model(&server) {
        let message = "the default model can't be changed; set sd_model_checkpoint in override_settings of each request";
        return Err(ApiError::invalid(message));
    }
    Ok(json(StatusCode::OK, &Fields::new()))
}

/// Lists the samplers.
#[utoipa::path(get, path = "/sdapi/v1/samplers", tag = "a1111", responses((status = 200, description = "Samplers", body = Vec<Object>)))]
pub(crate) async fn samplers() -> Response {
    json(StatusCode::OK, &serde_json::json!([{ "name": "Euler", "aliases": ["euler"], "options": {} }]))
}

/// Lists the models.
#[utoipa::path(get, path = "/sdapi/v1/sd-models", tag = "a1111", responses((status = 200, description = "Models", body = Vec<Object>)))]
pub(crate) async fn models(State(server): State<Server>) -> Response {
    let entry = |name: String| {
        serde_json::json!({
            "title": name, "model_name": name, "hash": null, "sha256": null, "filename": name, "config": null,
        })
    };
    let models: Vec<Value> = server.catalogue.models().into_iter().map(|m| entry(m.name)).collect();
    json(StatusCode::OK, &models)
}

/// Lists the LoRAs.
#[utoipa::path(get, path = "/sdapi/v1/loras", tag = "a1111", responses((status = 200, description = "LoRAs", body = Vec<Object>)))]
pub(crate) async fn loras(State(server): State<Server>) -> Response {
    let entry =
        |name: String| serde_json::json!({ "name": name, "alias": name, "path": name, "metadata": {} });
    let loras: Vec<Value> = server.catalogue.loras().into_iter().map(entry).collect();
    json(StatusCode::OK, &loras)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lora_tags_are_removed_from_the_prompt() {
        let (words, loras) = split_loras("a fox <lora:ink:0.8>, in snow<lora:old><lora:x:-1:0.5>");
        assert_eq!(words, "a fox , in snow");
        let pairs: Vec<_> = loras.iter().map(|l| (l.path.to_str().unwrap(), l.weight)).collect();
        assert_eq!(pairs, [("ink", 0.8), ("old", 1.0), ("x", -1.0)]);
        assert_eq!(split_loras("a <lora:open").0, "a <lora:open");
        assert_eq!(split_loras("").0, "");
    }
}

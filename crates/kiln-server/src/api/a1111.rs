//! The endpoints of A1111's web UI that other tools connect to.

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_engine::{LoraRef, Request};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::body::{Json, Room};
use super::error::{ApiError, ErrorBody};
use super::fields::{Fields, request};
use super::{Client, attach, finished, json};
use crate::Server;
use crate::generator::Blame;
use crate::live::{Live, Via};
use crate::store::JobState;

/// Strength when A1111's clients give none.
const STRENGTH: f64 = 0.75;
/// Fields of Kiln's request that are taken from `override_settings`. Other settings are A1111's, and ignored.
const SETTINGS: [&str; 6] = ["max_tokens", "rho", "rng", "schedule", "sigmas", "vae"];

/// A request for images. Fields that mean nothing here are ignored, as A1111's clients send many.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct Txt2Img {
    /// What to show; `<lora:NAME:WEIGHT>` in it asks for a LoRA.
    prompt: String,
    /// What to avoid.
    negative_prompt: Option<String>,
    /// Seed; -1 is a random one.
    seed: Option<i64>,
    /// Steps.
    steps: Option<u32>,
    /// Guidance.
    cfg_scale: Option<f32>,
    /// Width in pixels.
    width: Option<u32>,
    /// Height in pixels.
    height: Option<u32>,
    /// Images at once.
    batch_size: Option<u32>,
    /// How often.
    n_iter: Option<u32>,
    /// `sd_model_checkpoint` chooses the model; `max_tokens`, `rho`, `rng`, `schedule`, `sigmas` and `vae` are as in `/v1/jobs`.
    #[schema(value_type = Option<Object>)]
    override_settings: Option<Fields>,
    /// Images to start from, as base64; only the first is used.
    #[serde(skip_serializing)]
    init_images: Vec<String>,
    /// Where to change it, as base64: white is regenerated.
    #[serde(skip_serializing)]
    mask: Option<String>,
    /// How much to change the initial image: 0 keeps it, 1 ignores it.
    denoising_strength: Option<f64>,
    /// Work only on the mask's surroundings.
    inpaint_full_res: Option<Value>,
    /// This many pixels around it.
    inpaint_full_res_padding: Option<u32>,
}

/// Images in A1111's shape.
#[derive(Serialize, ToSchema)]
pub(crate) struct Pictures {
    /// The files, as base64.
    images: Vec<String>,
    /// The request again.
    parameters: Txt2Img,
    /// What was done, as JSON in a string.
    info: String,
}

impl Txt2Img {
    fn request(&self) -> Result<Request, ApiError> {
        let (prompt, loras) = split_loras(&self.prompt);
        let settings = self.override_settings.iter().flatten();
        let own = settings.filter(|(name, _)| SETTINGS.contains(&name.as_str()));
        let own = request(&own.map(|(name, value)| (name.clone(), value.clone())).collect())?;
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
            // -1 is a random one.
            seed: self.seed.and_then(|seed| u64::try_from(seed).ok()).into_iter().collect(),
            loras,
            ..own
        })
    }
}

/// The prompt without its `<lora:NAME:WEIGHT>`, and those.
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

/// Images from text.
#[utoipa::path(post, path = "/sdapi/v1/txt2img", tag = "a1111", request_body = Txt2Img, responses(
    (status = 200, body = Pictures),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn txt2img(
    State(server): State<Server>,
    Client(client): Client,
    Json(body, room): Json<Txt2Img>,
) -> Result<Response, ApiError> {
    let request = body.request()?;
    generate(server, client, body, request, room).await
}

/// An image from another one, whole or inside a mask.
#[utoipa::path(post, path = "/sdapi/v1/img2img", tag = "a1111", request_body = Txt2Img, responses(
    (status = 200, body = Pictures),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn img2img(
    State(server): State<Server>,
    Client(client): Client,
    Json(mut body, room): Json<Txt2Img>,
) -> Result<Response, ApiError> {
    let mut request = body.request()?;
    if body.init_images.is_empty() {
        return Err(ApiError::invalid("init_images is empty: send an image to start from"));
    }
    request.init = Some(body.init_images.swap_remove(0).into());
    request.mask = body.mask.take().map(Into::into);
    request.strength = Some(body.denoising_strength.unwrap_or(STRENGTH));
    let only_masked =
        matches!(&body.inpaint_full_res, Some(Value::Bool(true))) || body.inpaint_full_res == Some(1.into());
    if request.mask.is_some() && only_masked {
        request.mask_padding = Some(body.inpaint_full_res_padding.unwrap_or(32));
    }
    generate(server, client, body, request, room).await
}

async fn generate(
    server: Server,
    client: String,
    body: Txt2Img,
    request: Request,
    room: Room,
) -> Result<Response, ApiError> {
    let attached = attach(&server, request, &client, Via::A1111).await?;
    drop(room);
    let end = finished(&attached).await;
    // Somebody pressed "interrupt": what is there is the answer.
    let interrupted = end.error.as_ref().is_some_and(|e| e.blame == Blame::Cancelled);
    if let Some(error) = end.error.filter(|_| !interrupted) {
        return Err(error.into());
    }
    let seeds: Vec<u64> =
        end.pictures.iter().filter_map(|made| made.row.seed.as_ref()?.parse().ok()).collect();
    let (width, height) = end.pictures.first().map_or((0, 0), |made| (made.row.width, made.row.height));
    let info = serde_json::json!({
        "prompt": attached.live.request.prompts.first(),
        "negative_prompt": attached.live.request.negative_prompts.first(),
        "seed": seeds.first(),
        "all_seeds": seeds,
        "width": width,
        "height": height,
        "steps": end.progress.steps,
        "cfg_scale": attached.live.request.guidance,
        "sd_model_name": end.pictures.first().map(|made| &made.row.model),
        "interrupted": interrupted,
    });
    let images = end.pictures.iter().map(|made| BASE64_STANDARD.encode(&made.bytes)).collect();
    Ok(json(StatusCode::OK, &Pictures { images, parameters: body, info: info.to_string() }))
}

/// How far the image is that is generated.
#[derive(Serialize, ToSchema)]
pub(crate) struct ProgressAnswer {
    /// From 0 to 1.
    progress: f32,
    /// Seconds that the rest will take.
    eta_relative: f32,
    /// Steps and such.
    #[schema(value_type = Object)]
    state: Value,
    /// A preview, as base64.
    current_image: Option<String>,
    /// Words.
    textinfo: Option<String>,
}

/// Whether a preview is wanted.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Skip {
    /// Without a preview.
    skip_current_image: Option<bool>,
}

/// How far the image is that is generated.
#[utoipa::path(get, path = "/sdapi/v1/progress", tag = "a1111", params(Skip), responses(
    (status = 200, body = ProgressAnswer),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn progress(State(server): State<Server>, Query(skip): Query<Skip>) -> Response {
    let running = server.running().into_iter().find(|live| live.state() == JobState::Running);
    let snapshot = running.as_ref().map(|live| live.now()).unwrap_or_default();
    let wanted = skip.skip_current_image != Some(true);
    if let Some(live) = running.as_ref().filter(|_| wanted) {
        live.glance();
    }
    let image = snapshot
        .preview
        .as_ref()
        .filter(|_| wanted)
        .and_then(|preview| kiln_image::encode(&preview.picture, kiln_image::Format::Png, None).ok());
    let progress = &snapshot.progress;
    json(
        StatusCode::OK,
        &ProgressAnswer {
            progress: progress.fraction,
            eta_relative: snapshot.time_left.unwrap_or(0.0),
            state: serde_json::json!({
                "skipped": false,
                "interrupted": false,
                "job": running.as_ref().map_or("", |live| &live.id),
                "job_count": i32::from(running.is_some()),
                "job_no": progress.picture,
                "sampling_step": progress.step,
                "sampling_steps": progress.steps,
            }),
            current_image: image.map(|bytes| BASE64_STANDARD.encode(bytes)),
            textinfo: (snapshot.state == JobState::Running).then(|| progress.phase.name().to_owned()),
        },
    )
}

/// Stops the images that are generated, if they were asked for through this API.
#[utoipa::path(post, path = "/sdapi/v1/interrupt", tag = "a1111", responses((status = 200, description = "Done")))]
pub(crate) async fn interrupt(State(server): State<Server>) -> Response {
    let own = |live: &Live| live.via == Via::A1111 && live.state() == JobState::Running;
    for live in server.running().iter().filter(|live| own(live)) {
        server.cancel(&live.id);
    }
    json(StatusCode::OK, &Fields::new())
}

fn default_model(server: &Server) -> String {
    let models = server.catalogue.models();
    models.into_iter().find(|m| m.default).map(|m| m.name).unwrap_or_default()
}

/// The options that mean something here.
#[utoipa::path(get, path = "/sdapi/v1/options", tag = "a1111", responses((status = 200, description = "Options", body = Object)))]
pub(crate) async fn options(State(server): State<Server>) -> Response {
    let options =
        serde_json::json!({ "sd_model_checkpoint": default_model(&server), "samples_format": "png" });
    json(StatusCode::OK, &options)
}

/// Takes options; a model other than the server's own is chosen with each request, by `override_settings`.
#[utoipa::path(post, path = "/sdapi/v1/options", tag = "a1111", request_body = Object, responses(
    (status = 200, description = "Done"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn set_options(
    State(server): State<Server>,
    Json(options, _): Json<Fields>,
) -> Result<Response, ApiError> {
    let asked = options.get("sd_model_checkpoint").and_then(Value::as_str).unwrap_or_default();
    if !asked.is_empty() && asked != default_model(&server) {
        let message =
            "the server's model is chosen when it is started; name another one in override_settings";
        return Err(ApiError::invalid(message));
    }
    Ok(json(StatusCode::OK, &Fields::new()))
}

/// The one sampler.
#[utoipa::path(get, path = "/sdapi/v1/samplers", tag = "a1111", responses((status = 200, description = "Samplers", body = Vec<Object>)))]
pub(crate) async fn samplers() -> Response {
    json(StatusCode::OK, &serde_json::json!([{ "name": "Euler", "aliases": ["euler"], "options": {} }]))
}

/// Every model.
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

/// Every LoRA.
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
    fn loras_are_taken_out_of_the_prompt() {
        let (words, loras) = split_loras("a fox <lora:ink:0.8>, in snow<lora:old><lora:x:-1:0.5>");
        assert_eq!(words, "a fox , in snow");
        let pairs: Vec<_> = loras.iter().map(|l| (l.path.to_str().unwrap(), l.weight)).collect();
        assert_eq!(pairs, [("ink", 0.8), ("old", 1.0), ("x", -1.0)]);
        assert_eq!(split_loras("a <lora:open").0, "a <lora:open");
        assert_eq!(split_loras("").0, "");
    }
}

//! The part of the API of A1111's web UI that other tools use: generating here, the rest in the modules.

pub(crate) mod choice;
pub(crate) mod control;
pub(crate) mod lists;
pub(crate) mod options;
pub(crate) mod png_info;
mod unsupported;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_engine::{LoraRef, Recipe, Request};
use kiln_image::{Format, RgbImage};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::body::{BodyPermit, Json};
use super::error::ApiError;
use super::fields::{Fields, parse_request};
use super::images::enlarged;
use super::{Caller, reply, run_blocking, submit_attached, wait_until_ended};
use crate::jobs::Jobs;
use crate::jobs::intake::Intake;
use crate::jobs::job::Api;
use crate::jobs::live::{JobSnapshot, SavedImage};
use choice::A1111Options;
use unsupported::Unsupported;

/// A1111's default for `denoising_strength`.
const DEFAULT_STRENGTH: f64 = 0.75;
/// Maximum bytes of a request's settings, which the response repeats.
const MAX_SETTINGS: usize = 256 << 10;
/// Fields of Kiln's request that A1111 has elsewhere, or not at all. `override_settings` may hold the others; what is no
/// field is a setting of A1111's and ignored.
const NOT_SETTINGS: [&str; 25] = [
    "prompt",
    "original_prompt",
    "negative_prompt",
    "negative",
    "model",
    "loras",
    "lora_partial",
    "width",
    "height",
    "n",
    "seed",
    "embeds",
    "references",
    "init",
    "mask",
    "strength",
    "mask_padding",
    "upscale",
    "tile_size",
    "steps",
    "guidance",
    "noise",
    "output_format",
    "output_compression",
    "png",
];

/// A request in A1111's format. What would change the image and is not offered is refused; other fields are ignored, as
/// clients send many.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
    /// Schedule of the noise levels, one of `/sdapi/v1/schedulers`; other names mean the model's own.
    scheduler: Option<String>,
    /// `sd_model_checkpoint` selects the model, `sd_vae` the autoencoder; fields of `/v1/jobs` that A1111 has no field for, such as `rng`, `sigmas` and `cache`, are as there.
    #[cfg_attr(feature = "schema", schema(value_type = Option<Object>))]
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
    /// Whether black areas of the mask are regenerated instead of white ones; true or 1.
    inpainting_mask_invert: Option<Value>,
    /// What is not offered.
    #[serde(flatten)]
    unsupported: Unsupported,
}

/// Generated images in A1111's format.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct Txt2ImgResponse {
    /// The files as base64.
    images: Vec<String>,
    /// The request.
    parameters: Txt2Img,
    /// Seeds, size, steps, model and prompt, as JSON in a string.
    info: String,
}

impl Txt2Img {
    fn request(&self, jobs: &Jobs, choices: &A1111Options, caller: &Caller) -> Result<Request, ApiError> {
        self.unsupported.refuse()?;
        let (prompt, loras) = split_loras(&self.prompt);
        let settings = self.override_settings.clone().unwrap_or_default();
        let own = settings.iter().filter(|(name, _)| is_setting(name));
        let own = parse_request(&own.map(|(name, value)| (name.clone(), value.clone())).collect())?;
        let choice = choices.choice(jobs, caller, &settings);
        let count = self.batch_size.unwrap_or(1).max(1).saturating_mul(self.n_iter.unwrap_or(1).max(1));
        let negative = self.negative_prompt.clone().filter(|text| !text.is_empty());
        Ok(Request {
            prompts: vec![prompt],
            negative_prompts: negative.into_iter().collect(),
            model: choice.model.map(Into::into),
            n: Some(count),
            width: self.width,
            height: self.height,
            steps: self.steps,
            guidance: self.cfg_scale,
            // -1 means random.
            seed: self.seed.and_then(|seed| u64::try_from(seed).ok()).into_iter().collect(),
            loras,
            vae: own.vae.or_else(|| choice.vae.map(Into::into)),
            schedule: own.schedule.or_else(|| lists::schedule(self.scheduler.as_deref())),
            ..own
        })
    }
}

/// Whether `override_settings` may hold a field of Kiln's request.
fn is_setting(name: &str) -> bool {
    Request::field_names().contains(&name) && !NOT_SETTINGS.contains(&name)
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
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/txt2img", tag = "a1111", request_body = Txt2Img, responses((status = 200, body = Txt2ImgResponse))))]
pub(crate) async fn txt2img(
    State(intake): State<Intake>,
    State(choices): State<Arc<A1111Options>>,
    caller: Caller,
    Json(body, permit): Json<Txt2Img>,
) -> Result<Response, ApiError> {
    let request = body.request(intake.jobs(), &choices, &caller)?;
    generate(intake, caller, body, request, permit).await
}

/// Generates images from an initial image, optionally inside a mask.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/img2img", tag = "a1111", request_body = Txt2Img, responses((status = 200, body = Txt2ImgResponse))))]
pub(crate) async fn img2img(
    State(intake): State<Intake>,
    State(choices): State<Arc<A1111Options>>,
    caller: Caller,
    Json(mut body, mut permit): Json<Txt2Img>,
) -> Result<Response, ApiError> {
    let mut request = body.request(intake.jobs(), &choices, &caller)?;
    if body.init_images.is_empty() {
        return Err(ApiError::invalid("init_images is empty: img2img requires an initial image"));
    }
    request.init = Some(body.init_images.swap_remove(0).into());
    if let Some(mask) = body.mask.take() {
        let (state, storer) = (intake.clone(), caller.clone());
        let invert = is_set(body.inpainting_mask_invert.as_ref());
        let stored = run_blocking(move || {
            let stored = state.store_painted_mask(&mask, invert, &storer);
            Ok((stored?, permit))
        });
        let (mask, returned) = stored.await?;
        (request.mask, permit) = (Some(mask.into()), returned);
    }
    request.strength = Some(body.denoising_strength.unwrap_or(DEFAULT_STRENGTH));
    if request.mask.is_some() && is_set(body.inpaint_full_res.as_ref()) {
        request.mask_padding = Some(body.inpaint_full_res_padding.unwrap_or(32));
    }
    generate(intake, caller, body, request, permit).await
}

/// Whether a flag is set: clients send booleans or numbers.
fn is_set(flag: Option<&Value>) -> bool {
    flag.is_some_and(|flag| flag.as_bool().unwrap_or_else(|| flag.as_i64().is_some_and(|n| n != 0)))
}

async fn generate(
    intake: Intake,
    caller: Caller,
    mut body: Txt2Img,
    request: Request,
    permit: BodyPermit,
) -> Result<Response, ApiError> {
    // The settings stay in memory until the response is sent.
    body.init_images.clear();
    let echoed = serde_json::to_vec(&body).map_or(0, |text| text.len());
    if echoed > MAX_SETTINGS {
        let message = format!("the settings have {echoed} bytes, the limit is {MAX_SETTINGS}");
        return Err(ApiError::invalid(message));
    }
    let attached = submit_attached(&intake, request, &caller, Api::A1111, permit).await?;
    let end = wait_until_ended(&attached).await;
    // An interrupted job returns the images it has.
    let interrupted = end.error.as_ref().is_some_and(|e| e.is_cancelled());
    if let Some(error) = end.error.clone().filter(|_| !interrupted) {
        return Err(error.into());
    }
    reply(move || {
        let mut images: Vec<GeneratedImage> =
            end.images.iter().map(|image| GeneratedImage::saved(image)).collect();
        if interrupted && let Some(preview) = &end.preview {
            let request = &attached.live.request;
            let image = enlarged(&preview.image, request, intake.catalogue.unit(request));
            images.extend(GeneratedImage::unfinished(&intake, request, &image, images.len()));
        }
        let info = info(&attached.live.request, &end, &images, interrupted);
        let images = images.into_iter().map(|image| image.base64).collect();
        Ok(Txt2ImgResponse { images, parameters: body, info: info.to_string() })
    })
    .await
}

/// An image of a response.
struct GeneratedImage {
    base64: String,
    width: u32,
    height: u32,
    seed: Option<u64>,
    model: Option<String>,
    /// A1111's description of it.
    infotext: String,
}

impl GeneratedImage {
    fn saved(image: &SavedImage) -> GeneratedImage {
        let recipe = Recipe::parse(&image.row.recipe).ok();
        GeneratedImage {
            base64: BASE64_STANDARD.encode(&image.bytes),
            width: image.row.width,
            height: image.row.height,
            seed: image.row.seed.as_ref().and_then(|seed| seed.parse().ok()),
            model: Some(image.row.model.clone()),
            infotext: recipe.map(|recipe| recipe.parameters()).unwrap_or_default(),
        }
    }

    /// The enlarged preview of an interrupted image.
    fn unfinished(jobs: &Jobs, request: &Request, image: &RgbImage, index: usize) -> Option<GeneratedImage> {
        let (width, height) = (image.width(), image.height());
        let bytes = jobs.encode_preview(image, Format::Png.into(), request).ok()?;
        let seed = request.seeds(request.image_count()).get(index).copied();
        let prompt = request.prompts.first().cloned().unwrap_or_default();
        let base64 = BASE64_STANDARD.encode(bytes);
        Some(GeneratedImage { base64, width, height, seed, model: None, infotext: prompt })
    }
}

/// What A1111 tells about a response's images.
fn info(request: &Request, end: &JobSnapshot, images: &[GeneratedImage], interrupted: bool) -> Value {
    let seeds: Vec<Option<u64>> = images.iter().map(|image| image.seed).collect();
    let first = images.first();
    let repeated = |text: Option<&String>| vec![text.cloned().unwrap_or_default(); images.len()];
    let (prompt, negative) = (request.prompts.first(), request.negative_prompts.first());
    serde_json::json!({
        "prompt": prompt,
        "all_prompts": repeated(prompt),
        "negative_prompt": negative,
        "all_negative_prompts": repeated(negative),
        "seed": seeds.first(),
        "all_seeds": seeds,
        "width": first.map_or(0, |image| image.width),
        "height": first.map_or(0, |image| image.height),
        "sampler_name": lists::SAMPLER,
        "steps": end.progress.steps,
        "cfg_scale": request.guidance,
        "denoising_strength": request.strength,
        "batch_size": images.len(),
        "sd_model_name": first.and_then(|image| image.model.as_ref()),
        "infotexts": images.iter().map(|image| &image.infotext).collect::<Vec<_>>(),
        "index_of_first_image": 0,
        "interrupted": interrupted,
        "notes": end.notes,
    })
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

//! OpenAI's Images API, with Kiln's own parameters as extra fields.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::body::{Json, Whole, media_type, parse};
use super::error::{ApiError, ErrorBody};
use super::images::{Kind, respond};
use super::multipart::Form;
use super::{Client, aside, json};
use crate::engine::ModelInfo;
use crate::{LoraOrder, Order, OutputFormat, PngEffort, Server};

/// A request for pictures.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImagesRequest {
    /// What to paint.
    #[schema(example = "a red apple on a blue background")]
    pub(crate) prompt: String,
    /// The model's name; the server's own choice when absent.
    pub(crate) model: Option<String>,
    /// How many pictures.
    #[schema(minimum = 1, maximum = 10)]
    pub(crate) n: Option<u32>,
    /// `WIDTHxHEIGHT`, or `auto`.
    #[schema(example = "256x256")]
    pub(crate) size: Option<String>,
    /// `b64_json` or `url`.
    pub(crate) response_format: Option<ResponseFormat>,
    /// `png`, `jpeg` or `webp`.
    pub(crate) output_format: Option<OutputFormat>,
    /// JPEG quality.
    #[schema(minimum = 0, maximum = 100)]
    pub(crate) output_compression: Option<u8>,
    /// Server-sent events instead of one answer.
    pub(crate) stream: Option<bool>,
    /// Previews in a stream.
    #[schema(minimum = 0, maximum = 3)]
    pub(crate) partial_images: Option<u32>,
    /// Who asks, for fairness.
    pub(crate) user: Option<String>,
    /// Pictures to edit: data URLs, base64, `input:ID` or `picture:ID`. With a mask the first is the one to repaint, the
    /// others are references.
    #[serde(alias = "image")]
    pub(crate) images: Option<Sources>,
    /// Where to repaint: see-through places of the mask, or its white ones if it has none.
    pub(crate) mask: Option<Source>,
    /// Taken, and without effect.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) quality: Option<String>,
    /// Taken, and without effect.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) style: Option<String>,
    /// Taken, and without effect.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) background: Option<String>,
    /// Taken, and without effect.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) moderation: Option<String>,
    /// Taken, and without effect.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) input_fidelity: Option<String>,
    /// Seed; a random one when absent.
    pub(crate) seed: Option<u64>,
    /// Steps.
    #[schema(minimum = 1)]
    pub(crate) steps: Option<u32>,
    /// Guidance, on models that have it.
    pub(crate) guidance: Option<f32>,
    /// What to stay away from.
    pub(crate) negative_prompt: Option<String>,
    /// LoRAs by name, with their weights.
    #[serde(default)]
    pub(crate) loras: Vec<LoraOrder>,
    /// Further pictures to look at.
    #[serde(default)]
    pub(crate) references: Vec<String>,
    /// How far to leave the picture, from 0 to 1. Without a mask it makes the first picture the one to start from.
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) strength: Option<f64>,
    /// Work only on the mask's surroundings.
    pub(crate) mask_padding: Option<u32>,
    /// How hard PNG files are squeezed.
    #[serde(default)]
    pub(crate) png: PngEffort,
}

/// How pictures are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    /// In the answer, as base64.
    #[default]
    B64Json,
    /// As an address on this server.
    Url,
}

/// One picture, or an object that holds its address.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Source {
    /// As in an order.
    Text(String),
    /// As OpenAI's JSON has it.
    Object {
        /// A data URL.
        image_url: String,
    },
}

/// One picture or several.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Sources {
    /// One.
    One(Source),
    /// Several.
    Many(Vec<Source>),
}

impl Source {
    fn text(self) -> String {
        match self {
            Source::Text(text) | Source::Object { image_url: text } => text,
        }
    }
}

impl Sources {
    fn list(self) -> Vec<String> {
        match self {
            Sources::One(one) => vec![one.text()],
            Sources::Many(many) => many.into_iter().map(Source::text).collect(),
        }
    }
}

impl ImagesRequest {
    /// The order, but for its pictures.
    fn order(&self) -> Result<Order, ApiError> {
        let (width, height) = self.size.as_deref().map_or(Ok((None, None)), size)?;
        if self.partial_images.is_some_and(|n| n > 3) {
            return Err(ApiError::invalid("partial_images must lie between 0 and 3"));
        }
        Ok(Order {
            prompt: self.prompt.clone(),
            negative_prompt: self.negative_prompt.clone(),
            model: self.model.clone(),
            n: self.n,
            width,
            height,
            steps: self.steps,
            guidance: self.guidance,
            seed: self.seed,
            loras: self.loras.clone(),
            references: self.references.clone(),
            init: None,
            mask: None,
            strength: self.strength,
            mask_padding: self.mask_padding,
            output_format: self.output_format.unwrap_or_default(),
            output_compression: self.output_compression,
            png: self.png,
        })
    }
}

/// `512x384`, or `auto`.
fn size(text: &str) -> Result<(Option<u32>, Option<u32>), ApiError> {
    if text == "auto" {
        return Ok((None, None));
    }
    let sides = text.split_once('x').and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
    let (width, height) =
        sides.ok_or_else(|| ApiError::invalid("size must be WIDTHxHEIGHT, such as 1024x768, or auto"))?;
    Ok((Some(width), Some(height)))
}

/// Pictures in the order: the one to start from, where there is one, and those to look at.
fn place(order: &mut Order, mut images: Vec<String>, mask: Option<String>) -> Result<(), ApiError> {
    if images.is_empty() {
        return Err(ApiError::invalid("an edit needs a picture: send `image`"));
    }
    if mask.is_some() || order.strength.is_some() {
        order.init = Some(images.remove(0));
        order.mask = mask;
    }
    images.append(&mut order.references);
    order.references = images;
    Ok(())
}

/// Pictures from words.
#[utoipa::path(post, path = "/v1/images/generations", tag = "openai", request_body = ImagesRequest, responses(
    (status = 200, description = "The pictures, or with `stream` server-sent events", body = super::images::ImagesAnswer),
    (status = "4XX", description = "A request that can't be served", body = ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = ErrorBody),
))]
pub(crate) async fn generations(
    State(server): State<Server>,
    Client(client): Client,
    Json(request, room): Json<ImagesRequest>,
) -> Result<Response, ApiError> {
    if request.images.is_some() || request.mask.is_some() {
        return Err(ApiError::invalid(
            "pictures to edit go to /v1/images/edits; `references` are looked at here",
        ));
    }
    let order = request.order()?;
    respond(server, client, order, &request, Kind::Generation, room).await
}

/// Pictures from pictures: JSON, or a form with `image[]` and `mask`.
#[utoipa::path(post, path = "/v1/images/edits", tag = "openai",
    request_body(content((ImagesRequest = "application/json"), (ImagesRequest = "multipart/form-data"))), responses(
    (status = 200, description = "The pictures, or with `stream` server-sent events", body = super::images::ImagesAnswer),
    (status = "4XX", description = "A request that can't be served", body = ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = ErrorBody),
))]
pub(crate) async fn edits(
    State(server): State<Server>,
    Client(client): Client,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let kind = media_type(&parts.headers);
    if kind != "application/json" && kind != "multipart/form-data" {
        let message = "expected a body of type application/json or multipart/form-data";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_type", message));
    }
    let Whole { bytes, room } = Whole::read(&server, &parts.headers, body).await?;
    let (request, images, mask) = match kind.as_str() {
        "application/json" => {
            let mut request: ImagesRequest = parse(&bytes)?;
            let images = request.images.take().map_or(Vec::new(), Sources::list);
            (request.clone(), images, request.mask.map(Source::text))
        }
        _ => {
            let form = Form::read(&parts.headers, bytes).await?;
            let request = serde_json::from_value::<ImagesRequest>(form.fields);
            let request =
                request.map_err(|error| ApiError::invalid(format!("the form makes no sense: {error}")))?;
            let keeper = server.clone();
            let (images, mask) = aside(move || keep(&keeper, form.files)).await?;
            (request, images, mask)
        }
    };
    let mut order = request.order()?;
    place(&mut order, images, mask)?;
    respond(server, client, order, &request, Kind::Edit, room).await
}

/// Keeps a form's files; the names of the pictures and of the mask.
fn keep(
    server: &Server,
    files: Vec<(String, bytes::Bytes)>,
) -> Result<(Vec<String>, Option<String>), ApiError> {
    let (mut images, mut mask) = (Vec::new(), None);
    for (name, bytes) in files {
        match name.as_str() {
            "image" if images.len() < server.config.limits.references => {
                images.push(server.keep_input(&bytes, "image")?)
            }
            "image" => return Err(ApiError::invalid("there are too many pictures")),
            "mask" => mask = Some(server.keep_mask(&bytes)?),
            other => {
                let other: String = other.chars().take(80).collect();
                return Err(ApiError::invalid(format!(
                    "the form has a file `{other}`, expected image and mask"
                )));
            }
        }
    }
    Ok((images, mask))
}

/// A list in OpenAI's shape.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`
    object: &'static str,
    /// The models.
    data: Vec<ModelEntry>,
}

/// A model in OpenAI's shape, and what Kiln knows of it.
#[derive(Serialize, ToSchema)]
pub(crate) struct ModelEntry {
    /// Its name.
    id: String,
    /// `model`
    object: &'static str,
    /// Unknown: 0.
    created: u64,
    /// `kiln`
    owned_by: &'static str,
    /// Sizes, steps and guidance.
    kiln: ModelInfo,
}

/// Every model that can be asked for.
#[utoipa::path(get, path = "/v1/models", tag = "openai", responses((status = 200, body = ModelList)))]
pub(crate) async fn models(State(server): State<Server>) -> Response {
    let entry = |kiln: ModelInfo| ModelEntry {
        id: kiln.name.clone(),
        object: "model",
        created: 0,
        owned_by: "kiln",
        kiln,
    };
    let data = server.catalogue.models().into_iter().map(entry).collect();
    json(StatusCode::OK, &ModelList { object: "list", data })
}

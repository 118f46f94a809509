//! OpenAI's Images API. Every field that is not OpenAI's own is one of Kiln's request.

use axum::extract::{Request as HttpRequest, State};
use axum::http::StatusCode;
use axum::response::Response;
use kiln_engine::Request;
use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::body::{Json, Whole, media_type, parse};
use super::error::{ApiError, ErrorBody};
use super::fields::{Fields, one, read, request};
use super::images::{Kind, respond};
use super::multipart::Form;
use super::{Client, aside, json};
use crate::Server;
use crate::generator::ModelInfo;

/// OpenAI's fields that Kiln's own request does not have, or not with the same meaning.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct OpenAiFields {
    /// `WIDTHxHEIGHT`, or `auto`.
    #[schema(example = "256x256")]
    pub(crate) size: Option<String>,
    /// `b64_json` or `url`.
    pub(crate) response_format: Option<ResponseFormat>,
    /// Server-sent events instead of one answer.
    pub(crate) stream: Option<bool>,
    /// Previews in a stream.
    #[schema(minimum = 0, maximum = 3)]
    pub(crate) partial_images: Option<u32>,
    /// Who asks, for fairness.
    pub(crate) user: Option<String>,
    /// Images to edit: data URLs, base64, `input:ID` or `picture:ID`. With a mask the first is the one to change, and with
    /// `strength` the one to start from; the others are references.
    #[serde(alias = "image")]
    pub(crate) images: Option<Sources>,
    /// Where to change the image: transparent places of the mask, or its white ones if it has none.
    pub(crate) mask: Option<Source>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) quality: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) style: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) background: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) moderation: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "clients that send it shall work")]
    pub(crate) input_fidelity: Option<String>,
    /// All other fields: those of [`Request`].
    #[serde(flatten)]
    #[schema(ignore)]
    rest: Fields,
}

/// A request in OpenAI's shape: its fields, and all of Kiln's own.
pub(crate) struct ImagesRequest {
    pub(crate) openai: OpenAiFields,
    pub(crate) request: Request,
}

impl ImagesRequest {
    fn read(fields: &Fields) -> Result<ImagesRequest, ApiError> {
        let mut openai: OpenAiFields = read(fields)?;
        let mut request = request(&std::mem::take(&mut openai.rest))?;
        if openai.partial_images.is_some_and(|n| n > 3) {
            return Err(ApiError::invalid("partial_images must lie between 0 and 3"));
        }
        if let Some(size) = &openai.size {
            if request.width.is_some() || request.height.is_some() {
                return Err(ApiError::invalid("give size, or width and height, not both"));
            }
            (request.width, request.height) = sides(size)?;
        }
        Ok(ImagesRequest { openai, request })
    }
}

impl PartialSchema for ImagesRequest {
    fn schema() -> RefOr<Schema> {
        // One closed object: with `allOf`, each part would forbid the other's fields.
        let mut request = Request::schema();
        if let (RefOr::T(Schema::Object(all)), RefOr::T(Schema::Object(openai))) =
            (&mut request, OpenAiFields::schema())
        {
            all.properties.extend(openai.properties);
            all.description = Some("A request in OpenAI's shape: its fields, and all of Kiln's own.".into());
        }
        request
    }
}

impl ToSchema for ImagesRequest {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Request::schemas(schemas);
        OpenAiFields::schemas(schemas);
    }
}

/// How images are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    /// In the answer, as base64.
    #[default]
    B64Json,
    /// As an address on this server.
    Url,
}

/// One image, or an object that holds its address.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Source {
    /// As in a job.
    Text(String),
    /// As OpenAI's JSON has it.
    Object {
        /// A data URL.
        image_url: String,
    },
}

/// One image or several.
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

/// `512x384`, or `auto`.
fn sides(text: &str) -> Result<(Option<u32>, Option<u32>), ApiError> {
    if text == "auto" {
        return Ok((None, None));
    }
    let sides = text.split_once('x').and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
    let (width, height) =
        sides.ok_or_else(|| ApiError::invalid("size must be WIDTHxHEIGHT, such as 1024x768, or auto"))?;
    Ok((Some(width), Some(height)))
}

/// Puts the images of an edit into its request: one to start from, where there is one, the others as references.
fn place(request: &mut Request, mut images: Vec<String>, mask: Option<String>) -> Result<(), ApiError> {
    if images.is_empty() {
        return Err(ApiError::invalid("an edit needs an image: send `image`"));
    }
    if mask.is_some() || request.strength.is_some() {
        request.init = Some(images.remove(0).into());
        request.mask = mask.map(Into::into);
    }
    request.references.splice(..0, images.into_iter().map(Into::into));
    Ok(())
}

/// Images from text.
#[utoipa::path(post, path = "/v1/images/generations", tag = "openai", request_body = ImagesRequest, responses(
    (status = 200, description = "The images, or with `stream` server-sent events", body = super::images::ImagesAnswer),
    (status = "4XX", description = "A request that can't be served", body = ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = ErrorBody),
))]
pub(crate) async fn generations(
    State(server): State<Server>,
    Client(client): Client,
    Json(fields, room): Json<Fields>,
) -> Result<Response, ApiError> {
    let ImagesRequest { openai, request } = ImagesRequest::read(&fields)?;
    if openai.images.is_some() || openai.mask.is_some() {
        return Err(ApiError::invalid(
            "images to edit go to /v1/images/edits; here they can be `references`",
        ));
    }
    respond(server, client, request, &openai, Kind::Generation, room).await
}

/// Images from images: JSON, or a form with `image[]` and `mask`.
#[utoipa::path(post, path = "/v1/images/edits", tag = "openai",
    request_body(content((ImagesRequest = "application/json"), (ImagesRequest = "multipart/form-data"))), responses(
    (status = 200, description = "The images, or with `stream` server-sent events", body = super::images::ImagesAnswer),
    (status = "4XX", description = "A request that can't be served", body = ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = ErrorBody),
))]
pub(crate) async fn edits(
    State(server): State<Server>,
    Client(client): Client,
    http: HttpRequest,
) -> Result<Response, ApiError> {
    let (parts, body) = http.into_parts();
    let kind = media_type(&parts.headers);
    if kind != "application/json" && kind != "multipart/form-data" {
        let message = "expected a body of type application/json or multipart/form-data";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_type", message));
    }
    let Whole { bytes, room } = Whole::read(&server, &parts.headers, body).await?;
    let (fields, files) = if kind == "application/json" {
        (parse(&bytes)?, Vec::new())
    } else {
        let form = Form::read(&parts.headers, bytes).await?;
        (form.fields(|name, value| ImagesRequest::read(&one(name, value)).is_ok()), form.files)
    };
    let ImagesRequest { mut openai, mut request } = ImagesRequest::read(&fields)?;
    drop(fields);
    let mut sources = openai.images.take().map_or(Vec::new(), Sources::list);
    let mask = openai.mask.take().map(Source::text);
    let keeper = server.clone();
    let (images, mask) = aside(move || {
        let (images, file) = keep(&keeper, files)?;
        let mask = mask.map(|mask| keeper.keep_mask_source(mask)).transpose()?;
        Ok::<_, ApiError>((images, mask.or(file)))
    })
    .await?;
    sources.extend(images);
    place(&mut request, sources, mask)?;
    respond(server, client, request, &openai, Kind::Edit, room).await
}

/// Keeps a form's files; the names of the images and of the mask.
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
            "image" => return Err(ApiError::invalid("there are too many images")),
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

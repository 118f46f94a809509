//! OpenAI's Images API. All fields of Kiln's own request are accepted beside OpenAI's.

use axum::extract::{Request as HttpRequest, State};
use axum::http::StatusCode;
use axum::response::Response;
use kiln_engine::Request;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::body::{BodyReader, Json, RequestBody, media_type, parse};
use super::error::ApiError;
use super::fields::{Fields, parse_fields, parse_request, single_field};
use super::images::{Answer, Endpoint, ResponseFormat, respond};
use super::multipart::Form;
use super::{Caller, Path, json, run_blocking};
use crate::jobs::Jobs;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::generator::ModelInfo;
use crate::jobs::intake::Intake;

/// OpenAI's fields that Kiln's request lacks or defines differently.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct OpenAiFields {
    /// `WIDTHxHEIGHT`, or `auto`.
    #[cfg_attr(feature = "schema", schema(example = "256x256"))]
    pub(crate) size: Option<String>,
    /// `b64_json` or `url`; the default is `b64_json`, for models named `dall-e…` it is `url`.
    pub(crate) response_format: Option<ResponseFormat>,
    /// Whether to stream server-sent events.
    pub(crate) stream: Option<bool>,
    /// Number of previews in a stream.
    #[cfg_attr(feature = "schema", schema(minimum = 0, maximum = 3))]
    pub(crate) partial_images: Option<u32>,
    /// Accepted and ignored: a request counts for its API key.
    #[expect(dead_code, reason = "accepted for compatibility")]
    pub(crate) user: Option<String>,
    /// Images to edit: data URLs, base64, `input:ID` or `image:ID`. With `mask` or `strength` the first one is the
    /// initial image; all others are reference images.
    #[serde(alias = "image")]
    pub(crate) images: Option<ImageSources>,
    /// The mask: transparent areas are regenerated, or white ones if it has no transparency.
    pub(crate) mask: Option<ImageSource>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "accepted for compatibility")]
    pub(crate) quality: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "accepted for compatibility")]
    pub(crate) style: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "accepted for compatibility")]
    pub(crate) background: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "accepted for compatibility")]
    pub(crate) moderation: Option<String>,
    /// Accepted and ignored.
    #[expect(dead_code, reason = "accepted for compatibility")]
    pub(crate) input_fidelity: Option<String>,
    /// All other fields: those of [`Request`].
    #[serde(flatten)]
    #[cfg_attr(feature = "schema", schema(ignore))]
    rest: Fields,
}

impl OpenAiFields {
    fn answer(&self) -> Answer {
        Answer {
            format: self.response_format,
            stream: self.stream == Some(true),
            partial_images: self.partial_images.unwrap_or(0),
        }
    }
}

/// A request in OpenAI's format, with all fields of Kiln's own request.
pub(crate) struct ImagesRequest {
    pub(crate) openai: OpenAiFields,
    pub(crate) request: Request,
}

impl ImagesRequest {
    fn parse(fields: &Fields) -> Result<ImagesRequest, ApiError> {
        let mut openai: OpenAiFields = parse_fields(fields)?;
        let mut request = parse_request(&std::mem::take(&mut openai.rest))?;
        if openai.partial_images.is_some_and(|n| n > 3) {
            return Err(ApiError::invalid("partial_images must be between 0 and 3").param("partial_images"));
        }
        if let Some(size) = &openai.size {
            if request.width.is_some() || request.height.is_some() {
                return Err(
                    ApiError::invalid("size and width or height are mutually exclusive").param("size")
                );
            }
            (request.width, request.height) = parse_size(size)?;
        }
        Ok(ImagesRequest { openai, request })
    }
}

/// An image.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub(crate) enum ImageSource {
    /// A data URL, base64, `input:ID` or `image:ID`.
    Text(String),
    /// OpenAI's JSON format.
    Object {
        /// A data URL.
        image_url: String,
    },
}

/// One image or several.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub(crate) enum ImageSources {
    /// One.
    One(ImageSource),
    /// Several.
    Many(Vec<ImageSource>),
}

impl ImageSource {
    fn into_text(self) -> String {
        match self {
            ImageSource::Text(text) | ImageSource::Object { image_url: text } => text,
        }
    }
}

impl ImageSources {
    fn into_list(self) -> Vec<String> {
        match self {
            ImageSources::One(one) => vec![one.into_text()],
            ImageSources::Many(many) => many.into_iter().map(ImageSource::into_text).collect(),
        }
    }
}

/// Parses `WIDTHxHEIGHT` or `auto`.
fn parse_size(text: &str) -> Result<(Option<u32>, Option<u32>), ApiError> {
    if text == "auto" {
        return Ok((None, None));
    }
    let sides = text.split_once('x').and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
    let (width, height) = sides.ok_or_else(|| {
        ApiError::invalid("size must be WIDTHxHEIGHT, such as 1024x768, or auto").param("size")
    })?;
    Ok((Some(width), Some(height)))
}

/// Puts the images of an edit into its request: with a mask or strength the first one as initial image, the others as
/// references.
fn assign_images(
    request: &mut Request,
    mut images: Vec<String>,
    mask: Option<String>,
) -> Result<(), ApiError> {
    if images.is_empty() {
        return Err(ApiError::invalid("image is missing: an edit requires at least one").param("image"));
    }
    if mask.is_some() || request.strength.is_some() {
        request.init = Some(images.remove(0).into());
        request.mask = mask.map(Into::into);
    }
    request.references.splice(..0, images.into_iter().map(Into::into));
    Ok(())
}

/// Generates images from a prompt.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/images/generations", tag = "openai", request_body = ImagesRequest, responses(
    (status = 200, description = "The images, or with `stream` server-sent events", body = super::images::ImagesResponse),
    (status = "4XX", description = "Invalid request", body = crate::http::api::error::ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn generations(
    State(intake): State<Intake>,
    caller: Caller,
    Json(fields, permit): Json<Fields>,
) -> Result<Response, ApiError> {
    // Large input images take time to parse, and memory, even if the client disconnects.
    let parse = move || Ok((ImagesRequest::parse(&fields)?, permit));
    let (ImagesRequest { openai, request }, permit) = run_blocking(parse).await?;
    if openai.images.is_some() || openai.mask.is_some() {
        let message = "image and mask are not supported here: use /v1/images/edits, or `references`";
        return Err(ApiError::invalid(message).param("image"));
    }
    let answer = openai.answer();
    drop(openai);
    respond(intake, caller, request, answer, Endpoint::Generations, permit).await
}

/// Edits images; takes JSON, or a form with `image[]` and `mask`.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/images/edits", tag = "openai",
    request_body(content((ImagesRequest = "application/json"), (ImagesRequest = "multipart/form-data"))), responses(
    (status = 200, description = "The images, or with `stream` server-sent events", body = super::images::ImagesResponse),
    (status = "4XX", description = "Invalid request", body = crate::http::api::error::ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn edits(
    State(intake): State<Intake>,
    State(bodies): State<BodyReader>,
    caller: Caller,
    http: HttpRequest,
) -> Result<Response, ApiError> {
    let (parts, body) = http.into_parts();
    let media_type = media_type(&parts.headers);
    if media_type != "application/json" && media_type != "multipart/form-data" {
        let message = "expected content type application/json or multipart/form-data";
        return Err(ApiError::new(ErrorCode::MediaType, message));
    }
    let RequestBody { bytes, permit } = bodies.read(&parts, body).await?;
    let form = match media_type.as_str() {
        "application/json" => None,
        _ => Some(Form::read(&parts.headers, bytes.clone()).await?),
    };
    let (state, storer) = (intake.clone(), caller.clone());
    // The permit goes along: the files stay in memory until they are stored, even if the client disconnects.
    let (answer, request, permit) = run_blocking(move || {
        let (fields, files) = match form {
            None => (parse(&bytes)?, Vec::new()),
            Some(form) => {
                let fits =
                    |name: &str, value: &Value| ImagesRequest::parse(&single_field(name, value)).is_ok();
                (form.fields(fits), form.files)
            }
        };
        drop(bytes);
        let ImagesRequest { mut openai, mut request } = ImagesRequest::parse(&fields)?;
        drop(fields);
        let mut sources = openai.images.take().map_or(Vec::new(), ImageSources::into_list);
        let mask = openai.mask.take().map(ImageSource::into_text);
        let (images, file) = store_files(&state, files, &storer)?;
        let mask = mask.map(|mask| state.store_mask_source(mask, &storer)).transpose()?;
        sources.extend(images);
        assign_images(&mut request, sources, mask.or(file))?;
        Ok((openai.answer(), request, permit))
    })
    .await?;
    respond(intake, caller, request, answer, Endpoint::Edits, permit).await
}

/// Stores a form's files; returns the names of the images and of the mask.
fn store_files(
    intake: &Intake,
    files: Vec<(String, bytes::Bytes)>,
    caller: &Caller,
) -> Result<(Vec<String>, Option<String>), ApiError> {
    let (mut images, mut mask) = (Vec::new(), None);
    for (name, bytes) in files {
        match name.as_str() {
            "image" if images.len() < intake.config.limits.references => {
                images.push(intake.store_input(&bytes, "image", caller)?)
            }
            "image" => {
                return Err(ApiError::invalid(format!(
                    "the form has too many images, the limit is {}",
                    intake.config.limits.references
                )));
            }
            "mask" => mask = Some(intake.store_mask(&bytes, caller)?),
            other => {
                let other: String = other.chars().take(80).collect();
                return Err(ApiError::invalid(format!(
                    "unexpected file field `{other}`, expected `image` or `mask`"
                )));
            }
        }
    }
    Ok((images, mask))
}

/// A list of models in OpenAI's format.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ModelList {
    /// `list`
    object: &'static str,
    /// The models.
    data: Vec<ModelEntry>,
}

/// A model in OpenAI's format.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ModelEntry {
    /// Its name.
    id: String,
    /// `model`
    object: &'static str,
    /// Always 0.
    created: u64,
    /// `kiln`
    owned_by: &'static str,
    /// Its sizes, steps and guidance.
    kiln: ModelInfo,
}

impl ModelEntry {
    fn new(id: String, kiln: ModelInfo) -> ModelEntry {
        ModelEntry { id, object: "model", created: 0, owned_by: "kiln", kiln }
    }

    /// All models, then the aliases of models.
    fn all(jobs: &Jobs) -> Vec<ModelEntry> {
        let models = jobs.catalogue.models();
        let aliases = jobs.config.model_aliases.iter().filter_map(|(alias, name)| {
            let model = models.iter().find(|model| model.name == *name)?;
            Some(ModelEntry::new(alias.clone(), ModelInfo { default: false, ..model.clone() }))
        });
        let aliases: Vec<ModelEntry> = aliases.collect();
        models.into_iter().map(|model| ModelEntry::new(model.name.clone(), model)).chain(aliases).collect()
    }
}

/// Lists the models that requests can name.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/models", tag = "openai", responses((status = 200, body = ModelList))))]
pub(crate) async fn models(State(jobs): State<Jobs>) -> Response {
    json(StatusCode::OK, &ModelList { object: "list", data: ModelEntry::all(&jobs) })
}

/// Returns a model.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/models/{id}", tag = "openai", params(("id" = String, Path)), responses((status = 200, body = ModelEntry))))]
pub(crate) async fn model(State(jobs): State<Jobs>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let found = ModelEntry::all(&jobs).into_iter().find(|model| model.id == id);
    let missing = || JobError::not_found(ErrorCode::ModelNotFound, "model", &id).param("model");
    Ok(json(StatusCode::OK, &found.ok_or_else(missing)?))
}

/// Refuses variations: the models follow a prompt.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/images/variations", tag = "openai", responses((status = "4XX", description = "Always: there are no variations", body = crate::http::api::error::ErrorBody))))]
pub(crate) async fn variations() -> ApiError {
    let message = "variations are not supported: send the image and a prompt to /v1/images/edits, with `strength` for \
                   how much to change it";
    ApiError::new(ErrorCode::NotSupported, message)
}

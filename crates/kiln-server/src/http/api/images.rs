//! Responses of OpenAI's Images API: at once, or as a stream with previews.

use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use kiln_engine::Request;
use kiln_image::{Filter, RgbImage};
use serde::{Deserialize, Serialize};

use super::body::BodyPermit;
use super::error::ApiError;
use super::sse::{EventSource, event, stream_events};
use super::{Caller, reply, submit_attached, wait_until_ended};
use crate::jobs::Jobs;
use crate::jobs::error::JobError;
use crate::jobs::generator::name;
use crate::jobs::intake::{AttachedJob, Intake};
use crate::jobs::job::{Api, JobState};
use crate::jobs::live::{JobSnapshot, Preview, PreviewGuard, SavedImage};

/// How to answer a request: what is left of its fields while its job waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) format: Option<ResponseFormat>,
    pub(crate) stream: bool,
    pub(crate) partial_images: u32,
}

/// How images are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    /// As base64 in the response.
    B64Json,
    /// As a URL on this server.
    Url,
}

/// Generated images in OpenAI's format.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ImagesResponse {
    /// When they were generated, in seconds since 1970.
    created: i64,
    /// The images.
    data: Vec<ImageEntry>,
    /// The format of the files.
    output_format: &'static str,
    /// `WIDTHxHEIGHT`
    size: String,
    /// Messages about this job, such as adjusted settings.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// A generated image.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ImageEntry {
    /// The file as base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    b64_json: Option<String>,
    /// The URL of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    /// Its seed, as a string.
    seed: Option<String>,
    /// Its id in the gallery.
    id: String,
}

/// The endpoint that was called; events are named after it.
#[derive(Clone, Copy)]
pub(crate) enum Endpoint {
    Generations,
    Edits,
}

impl Endpoint {
    fn event_name(self, what: &str) -> String {
        match self {
            Endpoint::Generations => format!("image_generation.{what}"),
            Endpoint::Edits => format!("image_edit.{what}"),
        }
    }
}

/// Runs a request as a job; responds when it is done, or streams events.
pub(crate) async fn respond(
    intake: Intake,
    caller: Caller,
    request: Request,
    answer: Answer,
    endpoint: Endpoint,
    permit: BodyPermit,
) -> Result<Response, ApiError> {
    // As OpenAI does: its DALL-E models answer with URLs, later ones with the image.
    let named = request.model.as_deref().map_or("", name);
    let default_format =
        if named.starts_with("dall-e") { ResponseFormat::Url } else { ResponseFormat::B64Json };
    let attached = submit_attached(&intake, request, &caller, Api::OpenAi, permit).await?;
    if answer.stream {
        let max_previews = answer.partial_images;
        let watch = attached.live.watch();
        let preview_guard = (max_previews > 0).then(|| attached.live.watch_previews());
        let source = ImageEvents {
            unit: intake.catalogue.unit(&attached.live.request),
            jobs: intake.jobs().clone(),
            attached,
            _preview_guard: preview_guard,
            endpoint,
            max_previews,
            sent_previews: 0,
            last_preview: 0,
        };
        return Ok(stream_events(&intake, watch, source));
    }
    let end = wait_until_ended(&attached).await;
    if let Some(error) = end.error {
        return Err(ApiError::for_openai(error));
    }
    let urls = answer.format.unwrap_or(default_format) == ResponseFormat::Url;
    let base = urls.then_some(caller.base_url);
    let output_format = attached.live.request.output_format.unwrap_or_default().name();
    let (notes, images) = (end.notes, end.images);
    // Encoding megabytes as base64 takes milliseconds.
    reply(move || {
        let body = ImagesResponse {
            created: crate::jobs::store::now() / 1000,
            size: images.first().map_or(String::new(), |image| size(image)),
            data: images.iter().map(|image| entry(image, base.as_deref())).collect(),
            output_format,
            notes,
        };
        Ok(body)
    })
    .await
}

/// An image with its URL if there is a `base`, else with its bytes.
fn entry(image: &SavedImage, base: Option<&str>) -> ImageEntry {
    ImageEntry {
        b64_json: base.is_none().then(|| BASE64_STANDARD.encode(&image.bytes)),
        url: base.map(|base| format!("{base}/v1/images/{}/file", image.row.id)),
        seed: image.row.seed.clone(),
        id: image.row.id.clone(),
    }
}

fn size(image: &SavedImage) -> String {
    format!("{}x{}", image.row.width, image.row.height)
}

/// A preview in the size of its image. Sides that the request leaves open follow from the preview, which has two pixels for a
/// token of `unit` × `unit`.
pub(super) fn enlarged(preview: &RgbImage, request: &Request, unit: u32) -> RgbImage {
    let side = |asked: Option<u32>, preview: u32| match asked {
        Some(side) => side / unit * unit,
        None => preview * unit / 2,
    };
    let (width, height) = (side(request.width, preview.width()), side(request.height, preview.height()));
    kiln_image::resize(preview, width.max(1), height.max(1), Filter::Bicubic)
}

/// The events of a streamed job. Dropping it cancels the job.
struct ImageEvents {
    jobs: Jobs,
    attached: AttachedJob,
    /// Sides of the images are multiples of it.
    unit: u32,
    _preview_guard: Option<PreviewGuard>,
    endpoint: Endpoint,
    max_previews: u32,
    sent_previews: u32,
    /// Number of the last preview sent.
    last_preview: u32,
}

#[derive(Serialize)]
struct ImageEvent<'a> {
    #[serde(rename = "type")]
    name: &'a str,
    b64_json: String,
    created_at: i64,
    size: String,
    quality: &'static str,
    background: &'static str,
    output_format: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    partial_image_index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
}

/// Token counts as in OpenAI's API; always 0.
#[derive(Default, Serialize)]
struct Usage {
    total_tokens: u32,
    input_tokens: u32,
    output_tokens: u32,
    input_tokens_details: UsageDetails,
}

#[derive(Default, Serialize)]
struct UsageDetails {
    text_tokens: u32,
    image_tokens: u32,
}

impl ImageEvents {
    fn event<'a>(&self, name: &'a str, bytes: &[u8], size: String) -> ImageEvent<'a> {
        ImageEvent {
            name,
            b64_json: BASE64_STANDARD.encode(bytes),
            created_at: crate::jobs::store::now() / 1000,
            size,
            quality: "auto",
            background: "opaque",
            output_format: self.attached.live.request.output_format.unwrap_or_default().name(),
            partial_image_index: None,
            usage: None,
            seed: None,
            id: None,
        }
    }

    /// The event of a preview, enlarged to the size of the final image.
    fn preview_event(&mut self, preview: &Preview) -> Option<Bytes> {
        let request = &self.attached.live.request;
        let large = enlarged(&preview.image, request, self.unit);
        let bytes = self.jobs.encode_preview(&large, request.encoding(), request).ok()?;
        let name = self.endpoint.event_name("partial_image");
        let mut data = self.event(&name, &bytes, format!("{}x{}", large.width(), large.height()));
        data.partial_image_index = Some(self.sent_previews);
        let bytes = event(&name, &data);
        self.sent_previews += 1;
        Some(bytes)
    }

    fn completed_event(&self, image: &SavedImage) -> Bytes {
        let name = self.endpoint.event_name("completed");
        let mut data = self.event(&name, &image.bytes, size(image));
        data.usage = Some(Usage::default());
        data.seed = image.row.seed.clone();
        data.id = Some(image.row.id.clone());
        event(&name, &data)
    }
}

impl EventSource for ImageEvents {
    type Snapshot = JobSnapshot;

    fn events(&mut self, snapshot: &JobSnapshot, _: bool) -> (Vec<Bytes>, bool) {
        match (snapshot.state, &snapshot.error) {
            (JobState::Done, _) => {
                (snapshot.images.iter().map(|image| self.completed_event(image)).collect(), true)
            }
            (state, error) if state.is_final() => {
                let error = error.clone().unwrap_or_else(JobError::cancelled);
                (vec![event("error", &ApiError::for_openai(error).body())], true)
            }
            _ => {
                let Some(preview) = snapshot.preview.as_deref() else { return (Vec::new(), false) };
                let progress = &snapshot.progress;
                // Spread the previews evenly over the steps.
                let due = (self.sent_previews + 1) * progress.steps / (self.max_previews + 1);
                let is_due = preview.number != self.last_preview && progress.step >= due.max(1);
                if !is_due || self.sent_previews >= self.max_previews {
                    return (Vec::new(), false);
                }
                self.last_preview = preview.number;
                (self.preview_event(preview).into_iter().collect(), false)
            }
        }
    }
}

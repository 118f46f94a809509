//! Answers of OpenAI's Images API: whole, or as a stream with previews.

use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use kiln_engine::Request;
use kiln_image::Filter;
use serde::Serialize;
use utoipa::ToSchema;

use super::body::Room;
use super::error::ApiError;
use super::openai::{OpenAiFields, ResponseFormat};
use super::sse::{Teller, event, follow};
use super::{attach, finished, json};
use crate::Server;
use crate::generator::JobError;
use crate::live::{Looking, Made, Preview, Snapshot, Via};
use crate::server::Attached;
use crate::store::JobState;

/// Images, and what they were made with.
#[derive(Serialize, ToSchema)]
pub(crate) struct ImagesAnswer {
    /// When they were made, in seconds since 1970.
    created: i64,
    /// The images.
    data: Vec<ImageEntry>,
    /// The files' format.
    output_format: &'static str,
    /// `WIDTHxHEIGHT`
    size: String,
    /// What the model wanted to be known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// One image.
#[derive(Serialize, ToSchema)]
pub(crate) struct ImageEntry {
    /// The file, as base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    b64_json: Option<String>,
    /// The file's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    /// Its seed, as text.
    seed: Option<String>,
    /// Its name in the gallery.
    picture: String,
}

/// Which of the two calls it is, for the events' names.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Generation,
    Edit,
}

impl Kind {
    fn event(self, what: &str) -> String {
        match self {
            Kind::Generation => format!("image_generation.{what}"),
            Kind::Edit => format!("image_edit.{what}"),
        }
    }
}

/// Generates what is asked for, and answers when it is done or meanwhile.
pub(crate) async fn respond(
    server: Server,
    client: String,
    request: Request,
    openai: &OpenAiFields,
    kind: Kind,
    room: Room,
) -> Result<Response, ApiError> {
    let client = openai.user.clone().filter(|user| !user.is_empty()).unwrap_or(client);
    let attached = attach(&server, request, &client, Via::OpenAi).await?;
    // The images are files by now.
    drop(room);
    if openai.stream == Some(true) {
        let wanted = openai.partial_images.unwrap_or(0);
        let watch = attached.live.watch();
        let looking = (wanted > 0).then(|| attached.live.look());
        return Ok(follow(
            &server,
            watch,
            Stream { attached, _looking: looking, kind, wanted, sent: 0, last: 0 },
        ));
    }
    let end = finished(&attached).await;
    if let Some(error) = end.error {
        return Err(error.into());
    }
    let urls = openai.response_format.unwrap_or_default() == ResponseFormat::Url;
    let output_format = attached.live.request.output_format.unwrap_or_default().name();
    let (notes, pictures) = (end.notes, end.pictures);
    // Encoding megabytes takes milliseconds.
    super::aside(move || {
        let answer = ImagesAnswer {
            created: crate::store::now() / 1000,
            size: pictures.first().map_or(String::new(), |made| size(made)),
            data: pictures.iter().map(|made| entry(made, urls)).collect(),
            output_format,
            notes,
        };
        Ok::<_, ApiError>(json(StatusCode::OK, &answer))
    })
    .await
}

fn entry(made: &Made, urls: bool) -> ImageEntry {
    ImageEntry {
        b64_json: (!urls).then(|| BASE64_STANDARD.encode(&made.bytes)),
        url: urls.then(|| format!("/v1/pictures/{}/file", made.row.id)),
        seed: made.row.seed.clone(),
        picture: made.row.id.clone(),
    }
}

fn size(made: &Made) -> String {
    format!("{}x{}", made.row.width, made.row.height)
}

/// A stream's state. The job ends when the stream is dropped.
struct Stream {
    attached: Attached,
    _looking: Option<Looking>,
    kind: Kind,
    wanted: u32,
    sent: u32,
    last: u32,
}

#[derive(Serialize)]
struct ImageEvent<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
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
    picture: Option<String>,
}

/// OpenAI counts tokens; here they cost nothing.
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

impl Stream {
    fn image<'a>(&self, kind: &'a str, bytes: &[u8], size: String) -> ImageEvent<'a> {
        ImageEvent {
            kind,
            b64_json: BASE64_STANDARD.encode(bytes),
            created_at: crate::store::now() / 1000,
            size,
            quality: "auto",
            background: "opaque",
            output_format: self.attached.live.request.output_format.unwrap_or_default().name(),
            partial_image_index: None,
            usage: None,
            seed: None,
            picture: None,
        }
    }

    /// A preview, enlarged to the size that the image will have.
    fn partial(&mut self, preview: &Preview) -> Option<Bytes> {
        let small = &preview.picture;
        let request = &self.attached.live.request;
        let width = request.width.map_or(small.width() * 8, |w| w / 16 * 16).max(1);
        let height = request.height.map_or(small.height() * 8, |h| h / 16 * 16).max(1);
        let large = kiln_image::resize(small, width, height, Filter::Bicubic);
        let bytes = kiln_image::encode_as(&large, request.encoding(), None).ok()?;
        let name = self.kind.event("partial_image");
        let mut image = self.image(&name, &bytes, format!("{width}x{height}"));
        image.partial_image_index = Some(self.sent);
        let told = event(&name, &image);
        self.sent += 1;
        Some(told)
    }

    fn completed(&self, made: &Made) -> Bytes {
        let name = self.kind.event("completed");
        let mut image = self.image(&name, &made.bytes, size(made));
        image.usage = Some(Usage::default());
        image.seed = made.row.seed.clone();
        image.picture = Some(made.row.id.clone());
        event(&name, &image)
    }
}

impl Teller for Stream {
    fn tell(&mut self, snapshot: &Snapshot, _: bool) -> (Vec<Bytes>, bool) {
        match (snapshot.state, &snapshot.error) {
            (JobState::Done, _) => {
                (snapshot.pictures.iter().map(|made| self.completed(made)).collect(), true)
            }
            (state, error) if state.is_final() => {
                let error = error.clone().unwrap_or_else(JobError::cancelled);
                (vec![event("error", &ApiError::from(error).body())], true)
            }
            _ => {
                let Some(preview) = snapshot.preview.as_deref() else { return (Vec::new(), false) };
                let progress = &snapshot.progress;
                // Spread over the steps.
                let due = (self.sent + 1) * progress.steps / (self.wanted + 1);
                let fresh = preview.number > self.last && progress.step >= due.max(1);
                if !fresh || self.sent >= self.wanted {
                    return (Vec::new(), false);
                }
                self.last = preview.number;
                (self.partial(preview).into_iter().collect(), false)
            }
        }
    }
}

//! The jobs API: submit, list, status, events, result, cancel.

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use kiln_engine::{Phase, Progress, Request, wildcards};
use kiln_image::Encoding;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::body::Json;
use super::error::{ApiError, ErrorBody};
use super::fields::{Fields, parse_request};
use super::gallery::ImageView;
use super::sse::{EventSource, event, stream_events};
use super::{Client, json, run_blocking};
use crate::Server;
use crate::live::{Api, JobSnapshot, LiveJob, Preview, PreviewGuard};
use crate::server::random_seed;
use crate::store::{JobRow, JobState};

/// A job.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct JobView {
    /// Its id.
    id: String,
    /// `queued`, `running`, `done`, `failed` or `cancelled`.
    status: JobState,
    /// Number of jobs before it in the queue, while it is queued.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    /// Its progress, while it is running.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<ProgressView>,
    /// When it was submitted, in milliseconds since 1970.
    created: i64,
    /// When it was started.
    started: Option<i64>,
    /// When it ended.
    finished: Option<i64>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorView>,
    /// Its images that are finished.
    pictures: Vec<ImageView>,
    /// Messages about this job, such as adjusted settings.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    /// The request.
    #[serde(rename = "order")]
    request: Request,
}

/// Why a job failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorView {
    /// A stable code for programs.
    code: String,
    /// A message for people.
    message: String,
}

/// The progress of a job.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ProgressView {
    /// The current phase.
    phase: Phase,
    /// The current image, from 0.
    picture: u32,
    /// Number of images of the job.
    pictures: u32,
    /// Finished steps of the current image.
    step: u32,
    /// Steps per image.
    steps: u32,
    /// The tile in progress, from 1, of an image that is upscaled; else 0.
    tile: u32,
    /// Number of tiles of an image that is upscaled; else 0.
    tiles: u32,
    /// Progress of the whole job, from 0 to 1.
    fraction: f32,
    /// Estimated seconds left, once known.
    time_left: Option<f32>,
}

impl ProgressView {
    fn new(progress: &Progress, time_left: Option<f32>) -> ProgressView {
        let Progress { phase, image: picture, images: pictures, step, steps, tile, tiles, fraction } =
            *progress;
        ProgressView { phase, picture, pictures, step, steps, tile, tiles, fraction, time_left }
    }
}

impl JobView {
    pub(super) fn from_live(server: &Server, live: &LiveJob, snapshot: &JobSnapshot) -> JobView {
        let error = snapshot.error.as_ref();
        JobView {
            id: live.id.clone(),
            status: snapshot.state,
            position: server.position(&live.id),
            progress: (snapshot.state == JobState::Running)
                .then(|| ProgressView::new(&snapshot.progress, snapshot.time_left)),
            created: live.created,
            started: None,
            finished: None,
            error: error.map(|e| ErrorView { code: e.code.into(), message: e.message.clone() }),
            pictures: snapshot.images.iter().map(|image| ImageView::from(image.row.clone())).collect(),
            notes: snapshot.notes.clone(),
            request: live.request.clone(),
        }
    }

    fn from_row(server: &Server, row: JobRow) -> Result<JobView, ApiError> {
        let images = server.store.images_of(&row.id)?;
        Ok(JobView {
            status: row.state,
            position: None,
            progress: None,
            created: row.created,
            started: row.started,
            finished: row.finished,
            error: row.error.map(|(code, message)| ErrorView { code, message }),
            pictures: images.into_iter().map(ImageView::from).collect(),
            notes: Vec::new(),
            request: row.request,
            id: row.id,
        })
    }

    pub(super) fn find(server: &Server, id: &str) -> Result<JobView, ApiError> {
        if let Some(live) = server.live(id) {
            return Ok(JobView::from_live(server, &live, &live.snapshot()));
        }
        let row = server.store.job(id)?.ok_or_else(|| ApiError::not_found("job", id))?;
        JobView::from_row(server, row)
    }
}

/// The parameters of submitting a job.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SubmitParams {
    /// Whether `{red|blue}` in a prompt becomes one of the alternatives, as the image's seed chooses; false by default.
    wildcards: Option<bool>,
}

/// Submits a job and returns at once.
#[utoipa::path(post, path = "/v1/jobs", tag = "jobs", params(SubmitParams), request_body = Request, responses(
    (status = 202, description = "The job is queued", body = JobView),
    (status = "4XX", description = "The job is not accepted", body = ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = ErrorBody),
))]
pub(crate) async fn submit(
    State(server): State<Server>,
    Client(client): Client,
    Query(params): Query<SubmitParams>,
    Json(fields, permit): Json<Fields>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let mut request = parse_request(&fields)?;
        if params.wildcards == Some(true) {
            expand_wildcards(&mut request)?;
        }
        drop(fields);
        let request = server.accept_request(request)?;
        drop(permit);
        let live = server.submit(request, &client, Api::Jobs, false)?;
        Ok::<_, ApiError>(json(StatusCode::ACCEPTED, &JobView::from_live(&server, &live, &live.snapshot())))
    })
    .await
}

/// Replaces the wildcards of the prompts. The seed chooses, so a random one is drawn now.
fn expand_wildcards(request: &mut Request) -> Result<(), ApiError> {
    if request.seed.is_empty() {
        request.seed = vec![random_seed()];
    }
    wildcards::expand(request, None).map_err(|error| ApiError::invalid(error.to_string()))?;
    Ok(())
}

/// The parameters of the list of jobs.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct JobListParams {
    /// Maximum number of jobs; 50 by default.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// A list of jobs.
#[derive(Serialize, ToSchema)]
pub(crate) struct JobList {
    /// The jobs, newest first.
    data: Vec<JobView>,
}

/// Lists the latest jobs.
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", params(JobListParams), responses(
    (status = 200, body = JobList),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn list(
    State(server): State<Server>,
    Query(params): Query<JobListParams>,
) -> Result<Response, ApiError> {
    let rows = server.store.jobs(params.limit.unwrap_or(50).clamp(1, 1000))?;
    let view = |row: JobRow| match server.live(&row.id) {
        Some(live) => Ok(JobView::from_live(&server, &live, &live.snapshot())),
        None => JobView::from_row(&server, row),
    };
    let data = rows.into_iter().map(view).collect::<Result<_, _>>()?;
    Ok(json(StatusCode::OK, &JobList { data }))
}

/// Returns a job.
#[utoipa::path(get, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, body = JobView),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn status(
    State(server): State<Server>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &JobView::find(&server, &id)?))
}

/// Returns a job once it is done; 409 before.
#[utoipa::path(get, path = "/v1/jobs/{id}/result", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, body = JobView),
    (status = "4XX", description = "Not found, or not done", body = ErrorBody),
))]
pub(crate) async fn result(
    State(server): State<Server>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let view = JobView::find(&server, &id)?;
    let conflict = |code: &str, message: String| Err(ApiError::new(StatusCode::CONFLICT, code, message));
    match (view.status, &view.error) {
        (JobState::Done, _) => Ok(json(StatusCode::OK, &view)),
        (state, Some(error)) if state.is_final() => conflict(&error.code, error.message.clone()),
        (state, _) => conflict("not_done", format!("the job is {}", state.name())),
    }
}

/// Cancels a queued or running job.
#[utoipa::path(delete, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, description = "Cancelled, or will be within a step", body = JobView),
    (status = "4XX", description = "Not found, or already ended", body = ErrorBody),
))]
pub(crate) async fn cancel(
    State(server): State<Server>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if server.cancel(&id) {
        return Ok(json(StatusCode::OK, &JobView::find(&server, &id)?));
    }
    let view = JobView::find(&server, &id)?;
    let message = format!("the job has already ended: {}", view.status.name());
    Err(ApiError::new(StatusCode::CONFLICT, "at_its_end", message))
}

/// The parameters of a job's event stream.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventParams {
    /// Whether to send `preview` events; false by default.
    previews: Option<bool>,
}

/// Streams server-sent events until the job ends: `progress`, `picture`, on request `preview`, and finally `end`.
#[utoipa::path(get, path = "/v1/jobs/{id}/events", tag = "jobs", params(("id" = String, Path), EventParams), responses(
    (status = 200, description = "Events", content_type = "text/event-stream"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn events(
    State(server): State<Server>,
    Path(id): Path<String>,
    Query(params): Query<EventParams>,
) -> Result<Response, ApiError> {
    let Some(live) = server.live(&id) else {
        let view = JobView::find(&server, &id)?;
        let mut response = super::response(StatusCode::OK, "text/event-stream", event("end", &view));
        response.headers_mut().insert("cache-control", axum::http::HeaderValue::from_static("no-store"));
        return Ok(response);
    };
    let preview_guard = (params.previews == Some(true)).then(|| live.watch_previews());
    let watch = live.watch();
    let source = JobEvents { server: server.clone(), live, preview_guard, last_preview: 0, images: 0 };
    Ok(stream_events(&server, watch, source))
}

/// The events of a job, for one client.
struct JobEvents {
    server: Server,
    live: std::sync::Arc<LiveJob>,
    preview_guard: Option<PreviewGuard>,
    /// Number of the last preview sent.
    last_preview: u32,
    /// Number of images sent.
    images: usize,
}

/// An intermediate image.
#[derive(Serialize)]
struct PreviewEvent {
    picture: u32,
    step: u32,
    /// A small JPEG as a data URL.
    image: String,
}

impl JobEvents {
    fn preview(&mut self, preview: &Preview, progress: &Progress) -> Option<Bytes> {
        self.last_preview = preview.number;
        let encoding = Encoding { quality: Some(80), ..kiln_image::Format::Jpeg.into() };
        let bytes = kiln_image::encode_with(&preview.image, encoding, None).ok()?;
        let image = format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(bytes));
        Some(event("preview", &PreviewEvent { picture: progress.image, step: progress.step, image }))
    }
}

impl EventSource for JobEvents {
    fn events(&mut self, snapshot: &JobSnapshot, closing: bool) -> (Vec<Bytes>, bool) {
        let view = JobView::from_live(&self.server, &self.live, snapshot);
        if snapshot.state.is_final() || (closing && snapshot.error.is_some()) {
            return (vec![event("end", &view)], true);
        }
        let mut events = Vec::new();
        for image in snapshot.images.iter().skip(self.images) {
            events.push(event("picture", &ImageView::from(image.row.clone())));
        }
        self.images = snapshot.images.len();
        events.push(event("progress", &view));
        let preview = snapshot.preview.as_deref();
        let new = preview.filter(|p| self.preview_guard.is_some() && p.number > self.last_preview);
        events.extend(new.and_then(|preview| self.preview(preview, &snapshot.progress)));
        (events, false)
    }
}

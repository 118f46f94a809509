//! Jobs: an id at once, then status, events, result, cancel.

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use kiln_engine::{Phase, Progress, Request};
use kiln_image::Encoding;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::body::Json;
use super::error::{ApiError, ErrorBody};
use super::fields::{Fields, request};
use super::gallery::PictureView;
use super::sse::{Teller, event, follow};
use super::{Client, aside, json};
use crate::Server;
use crate::live::{Live, Looking, Preview, Snapshot, Via};
use crate::store::{JobRow, JobState};

/// The state of a job.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct JobView {
    /// Its name.
    id: String,
    /// `queued`, `running`, `done`, `failed` or `cancelled`.
    status: JobState,
    /// Jobs before it, while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    /// How far it is, while it is generated.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<ProgressView>,
    /// When it came, in milliseconds since 1970.
    created: i64,
    /// When it was begun.
    started: Option<i64>,
    /// When it ended.
    finished: Option<i64>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorView>,
    /// Its images, as they are done.
    pictures: Vec<PictureView>,
    /// What the model wanted to be known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    /// What was asked for.
    #[serde(rename = "order")]
    request: Request,
}

/// Why a job failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorView {
    /// A stable word for programs.
    code: String,
    /// A sentence for people.
    message: String,
}

/// How far a job is.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ProgressView {
    /// What is being done.
    phase: Phase,
    /// Which image, from 0.
    picture: u32,
    /// How many images there will be.
    pictures: u32,
    /// Steps of this image that are done.
    step: u32,
    /// Steps of each image.
    steps: u32,
    /// How much of the whole is done, from 0 to 1.
    fraction: f32,
    /// Seconds that the rest will take, when that can be told.
    time_left: Option<f32>,
}

impl ProgressView {
    fn new(progress: &Progress, time_left: Option<f32>) -> ProgressView {
        let Progress { phase, picture, pictures, step, steps, fraction } = *progress;
        ProgressView { phase, picture, pictures, step, steps, fraction, time_left }
    }
}

impl JobView {
    fn live(server: &Server, live: &Live, snapshot: &Snapshot) -> JobView {
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
            pictures: snapshot.pictures.iter().map(|made| PictureView::from(made.row.clone())).collect(),
            notes: snapshot.notes.clone(),
            request: live.request.clone(),
        }
    }

    fn kept(server: &Server, row: JobRow) -> Result<JobView, ApiError> {
        let pictures = server.store.pictures_of(&row.id)?;
        Ok(JobView {
            status: row.state,
            position: None,
            progress: None,
            created: row.created,
            started: row.started,
            finished: row.finished,
            error: row.error.map(|(code, message)| ErrorView { code, message }),
            pictures: pictures.into_iter().map(PictureView::from).collect(),
            notes: Vec::new(),
            request: row.request,
            id: row.id,
        })
    }

    fn find(server: &Server, id: &str) -> Result<JobView, ApiError> {
        if let Some(live) = server.live(id) {
            return Ok(JobView::live(server, &live, &live.now()));
        }
        let row = server.store.job(id)?.ok_or_else(|| ApiError::not_found("job", id))?;
        JobView::kept(server, row)
    }
}

/// Takes a job and answers at once.
#[utoipa::path(post, path = "/v1/jobs", tag = "jobs", request_body = Request, responses(
    (status = 202, description = "The job waits", body = JobView),
    (status = "4XX", description = "A job that can't be taken", body = ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = ErrorBody),
))]
pub(crate) async fn submit(
    State(server): State<Server>,
    Client(client): Client,
    Json(fields, room): Json<Fields>,
) -> Result<Response, ApiError> {
    aside(move || {
        let request = request(&fields)?;
        drop(fields);
        let request = server.take_in(request)?;
        drop(room);
        let live = server.submit(request, &client, Via::Jobs, false)?;
        Ok::<_, ApiError>(json(StatusCode::ACCEPTED, &JobView::live(&server, &live, &live.now())))
    })
    .await
}

/// How many.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Most {
    /// How many at most.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// A list of jobs.
#[derive(Serialize, ToSchema)]
pub(crate) struct JobList {
    /// Newest first.
    data: Vec<JobView>,
}

/// The latest jobs.
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", params(Most), responses(
    (status = 200, body = JobList),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn list(
    State(server): State<Server>,
    Query(most): Query<Most>,
) -> Result<Response, ApiError> {
    let rows = server.store.jobs(most.limit.unwrap_or(50).clamp(1, 1000))?;
    let view = |row: JobRow| match server.live(&row.id) {
        Some(live) => Ok(JobView::live(&server, &live, &live.now())),
        None => JobView::kept(&server, row),
    };
    let data = rows.into_iter().map(view).collect::<Result<_, _>>()?;
    Ok(json(StatusCode::OK, &JobList { data }))
}

/// The state of a job.
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

/// A job's images, once it is done; 409 before.
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

/// Stops a job, or takes it out of the queue.
#[utoipa::path(delete, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, description = "It is cancelled, or will be within a step", body = JobView),
    (status = "4XX", description = "Not found, or already at its end", body = ErrorBody),
))]
pub(crate) async fn cancel(
    State(server): State<Server>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if server.cancel(&id) {
        return Ok(json(StatusCode::OK, &JobView::find(&server, &id)?));
    }
    let view = JobView::find(&server, &id)?;
    let message = format!("the job is {}", view.status.name());
    Err(ApiError::new(StatusCode::CONFLICT, "at_its_end", message))
}

/// Whether previews are wanted.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct WithPreviews {
    /// Whether `preview` events are wanted.
    previews: Option<bool>,
}

/// Server-sent events until the job ends: `progress` and, if wanted, `preview`, at last `end` with the job.
#[utoipa::path(get, path = "/v1/jobs/{id}/events", tag = "jobs", params(("id" = String, Path), WithPreviews), responses(
    (status = 200, description = "Events", content_type = "text/event-stream"),
    (status = "4XX", body = ErrorBody),
))]
pub(crate) async fn events(
    State(server): State<Server>,
    Path(id): Path<String>,
    Query(with): Query<WithPreviews>,
) -> Result<Response, ApiError> {
    let Some(live) = server.live(&id) else {
        let view = JobView::find(&server, &id)?;
        let mut response = super::answer(StatusCode::OK, "text/event-stream", event("end", &view));
        response.headers_mut().insert("cache-control", axum::http::HeaderValue::from_static("no-store"));
        return Ok(response);
    };
    let looking = (with.previews == Some(true)).then(|| live.look());
    let watch = live.watch();
    Ok(follow(&server.clone(), watch, Events { server, live, looking, last: 0, pictures: 0 }))
}

struct Events {
    server: Server,
    live: std::sync::Arc<Live>,
    looking: Option<Looking>,
    last: u32,
    pictures: usize,
}

/// What an image looks like so far.
#[derive(Serialize)]
struct PreviewEvent {
    picture: u32,
    step: u32,
    /// A small JPEG as a data URL.
    image: String,
}

impl Events {
    fn preview(&mut self, preview: &Preview, progress: &Progress) -> Option<Bytes> {
        self.last = preview.number;
        let encoding = Encoding { quality: Some(80), ..kiln_image::Format::Jpeg.into() };
        let bytes = kiln_image::encode_as(&preview.picture, encoding, None).ok()?;
        let image = format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(bytes));
        Some(event("preview", &PreviewEvent { picture: progress.picture, step: progress.step, image }))
    }
}

impl Teller for Events {
    fn tell(&mut self, snapshot: &Snapshot, closing: bool) -> (Vec<Bytes>, bool) {
        let view = JobView::live(&self.server, &self.live, snapshot);
        if snapshot.state.is_final() || (closing && snapshot.error.is_some()) {
            return (vec![event("end", &view)], true);
        }
        let mut told = Vec::new();
        for made in snapshot.pictures.iter().skip(self.pictures) {
            told.push(event("picture", &PictureView::from(made.row.clone())));
        }
        self.pictures = snapshot.pictures.len();
        told.push(event("progress", &view));
        let fresh = snapshot.preview.as_deref().filter(|p| self.looking.is_some() && p.number > self.last);
        told.extend(fresh.and_then(|preview| self.preview(preview, &snapshot.progress)));
        (told, false)
    }
}

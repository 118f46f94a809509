//! The jobs API: submit, list, status, result, cancel.

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use kiln_base::hex;
use kiln_engine::{Phase, Progress, Request, wildcards};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::body::Json;
use super::error::ApiError;
use super::fields::{Fields, parse_request};
use super::gallery::ImageView;
use super::{Caller, Path, Query, checked_limit, json, run_blocking, with_location};
use crate::Server;
use crate::live::{Api, JobSnapshot, LiveJob};
use crate::priority::Priority;
use crate::server::{NewJob, SubmitError, random_seed};
use crate::store::{IdempotencyKey, JobRow, JobState};

/// A job.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct JobView {
    /// Its id.
    id: String,
    /// `queued`, `running`, `done`, `failed` or `cancelled`.
    status: JobState,
    /// Number of jobs whose turn comes before its own, while it is queued.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    /// Its priority.
    priority: Priority,
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
    pub(crate) pictures: Vec<ImageView>,
    /// Messages about this job, such as adjusted settings.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    /// The request.
    #[serde(rename = "order")]
    request: Request,
}

/// Why a job failed.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ErrorView {
    /// A stable code for programs.
    code: String,
    /// A message for people.
    message: String,
}

/// The progress of a job.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
    /// Steps of the current image so far that reused the step cache.
    reused: u32,
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
        let Progress { phase, image: picture, images: pictures, step, steps, reused, tile, tiles, fraction } =
            *progress;
        ProgressView { phase, picture, pictures, step, steps, reused, tile, tiles, fraction, time_left }
    }
}

impl JobView {
    pub(crate) fn from_live(server: &Server, live: &LiveJob, snapshot: &JobSnapshot) -> JobView {
        let error = snapshot.error.as_ref();
        JobView {
            id: live.id.clone(),
            status: snapshot.state,
            position: server.position(&live.id),
            priority: live.priority,
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
            priority: row.priority,
            progress: None,
            created: row.created,
            started: row.started,
            finished: row.finished,
            error: row.error.map(|(code, message)| ErrorView { code, message }),
            pictures: images.into_iter().map(ImageView::from).collect(),
            notes: row.notes,
            request: row.request,
            id: row.id,
        })
    }

    /// A job that the caller may see.
    pub(crate) fn find(server: &Server, id: &str, caller: &Caller) -> Result<JobView, ApiError> {
        JobView::find_if(server, id, |client| caller.sees(client))
    }

    /// A job, if `visible` accepts the client that submitted it.
    pub(crate) fn find_if(
        server: &Server,
        id: &str,
        visible: impl Fn(&str) -> bool,
    ) -> Result<JobView, ApiError> {
        if let Some(live) = server.live(id).filter(|live| visible(&live.client)) {
            return Ok(JobView::from_live(server, &live, &live.snapshot()));
        }
        let row = server.stored_job(id)?.filter(|row| visible(&row.client));
        JobView::from_row(server, row.ok_or_else(|| ApiError::not_found("job", id))?)
    }

    /// The job as it is stored, which is its end even before the queue has forgotten it.
    pub(crate) fn stored(server: &Server, id: &str) -> Result<JobView, ApiError> {
        let row = server.stored_job(id)?.ok_or_else(|| ApiError::not_found("job", id))?;
        JobView::from_row(server, row)
    }

    /// [`JobView::find`] away from the threads that serve requests.
    pub(crate) async fn load(server: &Server, id: String, caller: Caller) -> Result<JobView, ApiError> {
        let server = server.clone();
        run_blocking(move || JobView::find(&server, &id, &caller)).await
    }
}

/// The parameters of submitting a job.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub(crate) struct SubmitParams {
    /// Whether `{red|blue}` in a prompt becomes one of the alternatives, as the image's seed chooses; false by default.
    wildcards: Option<bool>,
}

/// Submits a job and returns at once.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/jobs", tag = "jobs", params(super::openapi::SubmitHeaders, SubmitParams), request_body = super::openapi::JobRequest, responses(
    (status = 202, description = "The job is queued; `Location` is its address", body = JobView),
    (status = "4XX", description = "The job is not accepted", body = crate::api::error::ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = crate::api::error::ErrorBody),
)))]
pub(crate) async fn submit(
    State(server): State<Server>,
    caller: Caller,
    headers: HeaderMap,
    Query(params): Query<SubmitParams>,
    Json(mut fields, permit): Json<Fields>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let key = idempotency_key(&headers, &caller.client, &fields, &params)?;
        if let Some((job, fingerprint)) =
            key.as_ref().map(|key| server.store.job_of_key(key)).transpose()?.flatten()
        {
            let same = key.is_some_and(|key| key.fingerprint == fingerprint);
            return if same { repeated(&server, &job) } else { Err(other_request()) };
        }
        let webhook = server.webhook_of(&mut fields)?;
        let priority = Priority::of_fields(&mut fields, &caller)?;
        let mut request = parse_request(&fields)?;
        if params.wildcards == Some(true) {
            // Before they multiply: every image gets its own prompt.
            server.config.limits.check_texts(&request)?;
            expand_wildcards(&mut request)?;
        }
        drop(fields);
        let request = server.accept_request(request, &caller)?;
        drop(permit);
        let new = NewJob { request, caller, api: Api::Jobs, attached: false, key, webhook, priority };
        let live = match server.submit(new) {
            // The key was used at the same time: the other request was first.
            Err(SubmitError::Repeated(Some(job))) => return repeated(&server, &job),
            Err(SubmitError::Repeated(None)) => return Err(other_request()),
            submitted => submitted?,
        };
        Ok(accepted(&JobView::from_live(&server, &live, &live.snapshot())))
    })
    .await
}

fn accepted(view: &JobView) -> Response {
    with_location(json(StatusCode::ACCEPTED, view), &format!("/v1/jobs/{}", view.id))
}

/// The response to a request that was sent before.
fn repeated(server: &Server, job: &str) -> Result<Response, ApiError> {
    let mut response = accepted(&JobView::find_if(server, job, |_| true)?);
    response.headers_mut().insert("idempotency-replayed", HeaderValue::from_static("true"));
    Ok(response)
}

fn other_request() -> ApiError {
    let message = "this Idempotency-Key was used for another request; choose a new one for every request";
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_key", message)
}

/// The idempotency key of a request, with a hash of what it asks for.
fn idempotency_key(
    headers: &HeaderMap,
    client: &str,
    fields: &Fields,
    params: &SubmitParams,
) -> Result<Option<IdempotencyKey>, ApiError> {
    const MAX: usize = 255;
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let key = key.to_str().ok().filter(|key| !key.is_empty() && key.len() <= MAX);
    let key = key
        .ok_or_else(|| ApiError::invalid(format!("Idempotency-Key must have 1 to {MAX} ASCII characters")))?;
    let mut asked = serde_json::to_vec(fields).unwrap_or_default();
    if params.wildcards == Some(true) {
        asked.extend(b"?wildcards");
    }
    let fingerprint = hex(Sha256::digest(asked));
    Ok(Some(IdempotencyKey { client: client.to_owned(), key: key.to_owned(), fingerprint }))
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
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub(crate) struct JobListParams {
    /// Maximum number of jobs; 50 by default.
    #[cfg_attr(feature = "schema", param(minimum = 1, maximum = 1000, value_type = Option<u32>))]
    limit: Option<i64>,
}

/// A list of jobs.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct JobList {
    /// The jobs, newest first.
    data: Vec<JobView>,
}

/// Lists the latest jobs.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/jobs", tag = "jobs", params(JobListParams), responses(
    (status = 200, body = JobList),
    (status = "4XX", body = crate::api::error::ErrorBody),
)))]
pub(crate) async fn list(
    State(server): State<Server>,
    caller: Caller,
    Query(params): Query<JobListParams>,
) -> Result<Response, ApiError> {
    let limit = checked_limit(params.limit, 50, 1000)?;
    run_blocking(move || {
        let rows = server.stored_jobs(limit, caller.only())?;
        let view = |row: JobRow| match server.live(&row.id) {
            Some(live) => Ok(JobView::from_live(&server, &live, &live.snapshot())),
            None => JobView::from_row(&server, row),
        };
        let data = rows.into_iter().map(view).collect::<Result<_, ApiError>>()?;
        Ok::<_, ApiError>(json(StatusCode::OK, &JobList { data }))
    })
    .await
}

/// Returns a job.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, body = JobView),
    (status = "4XX", body = crate::api::error::ErrorBody),
)))]
pub(crate) async fn status(
    State(server): State<Server>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &JobView::load(&server, id, caller).await?))
}

/// Returns a job once it is done; 409 before.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/jobs/{id}/result", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, body = JobView),
    (status = "4XX", description = "Not found, or not done", body = crate::api::error::ErrorBody),
)))]
pub(crate) async fn result(
    State(server): State<Server>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let view = JobView::load(&server, id, caller).await?;
    let conflict = |code: &str, message: String| Err(ApiError::new(StatusCode::CONFLICT, code, message));
    match (view.status, &view.error) {
        (JobState::Done, _) => Ok(json(StatusCode::OK, &view)),
        (state, Some(error)) if state.is_final() => conflict(&error.code, error.message.clone()),
        (state, _) => conflict("not_done", format!("the job is {}", state.name())),
    }
}

/// Cancels a queued or running job.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, description = "Cancelled, or will be within a step", body = JobView),
    (status = "4XX", description = "Not found, or already ended", body = crate::api::error::ErrorBody),
)))]
pub(crate) async fn cancel(
    State(server): State<Server>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let visible = server.live(&id).is_some_and(|live| caller.sees(&live.client));
        let cancelled = visible && server.cancel_now(&id);
        let view = JobView::find(&server, &id, &caller)?;
        if cancelled {
            return Ok(json(StatusCode::OK, &view));
        }
        let message = format!("the job has already ended: {}", view.status.name());
        Err(ApiError::new(StatusCode::CONFLICT, "at_its_end", message))
    })
    .await
}

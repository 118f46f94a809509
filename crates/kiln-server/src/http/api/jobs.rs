//! The jobs API: submit, list, status, result, cancel.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use kiln_base::hex;
use kiln_engine::{Request, wildcards};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::body::Json;
use super::error::ApiError;
use super::fields::{Fields, parse_request};
use super::job_view::JobView;
use super::{Caller, Path, Query, checked_limit, json, reply, run_blocking, with_location};
use crate::http::webhooks::Webhooks;
use crate::jobs::Jobs;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::intake::{Intake, NewJob};
use crate::jobs::job::{Api, Job, JobState};
use crate::jobs::priority::Priority;
use crate::jobs::random::random_seed;
use crate::jobs::roles::SubmitError;
use crate::jobs::store::IdempotencyKey;

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
    (status = "4XX", description = "The job is not accepted", body = crate::http::api::error::ErrorBody),
    (status = 429, description = "The queue is full; `Retry-After` says when to try again", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn submit(
    State(intake): State<Intake>,
    State(webhooks): State<Arc<Webhooks>>,
    caller: Caller,
    headers: HeaderMap,
    Query(params): Query<SubmitParams>,
    Json(mut fields, permit): Json<Fields>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let key = idempotency_key(&headers, &caller.client, &fields, &params)?;
        if let Some((job, fingerprint)) =
            key.as_ref().map(|key| intake.store.job_of_key(key)).transpose()?.flatten()
        {
            let same = key.is_some_and(|key| key.fingerprint == fingerprint);
            return if same { repeated(intake.jobs(), &job) } else { Err(other_request()) };
        }
        let webhook = webhooks.of_fields(&mut fields)?;
        let priority = priority_of(&mut fields, &caller)?;
        let mut request = parse_request(&fields)?;
        if params.wildcards == Some(true) {
            // Before they multiply: every image gets its own prompt.
            intake.config.limits.check_texts(&request)?;
            expand_wildcards(&mut request)?;
        }
        drop(fields);
        let request = intake.accept_request(request, &caller)?;
        drop(permit);
        let new = NewJob { request, caller, api: Api::Jobs, attached: false, key, webhook, priority };
        let live = match intake.submit(new) {
            // The key was used at the same time: the other request was first.
            Err(SubmitError::Repeated(Some(job))) => return repeated(intake.jobs(), &job),
            Err(SubmitError::Repeated(None)) => return Err(other_request()),
            submitted => submitted?,
        };
        Ok(accepted(&JobView::from_live(intake.jobs(), &live, &live.snapshot())))
    })
    .await
}

/// Takes the priority out of a job's fields. A client may ask for at most its own.
fn priority_of(fields: &mut Fields, caller: &Caller) -> Result<Priority, JobError> {
    let invalid = |code, message| Err(JobError::new(code, message).param("priority"));
    let highest = caller.quotas.priority.unwrap_or(Priority::High);
    let priority = match fields.remove("priority") {
        None | Some(Value::Null) => return Ok(caller.quotas.usual_priority()),
        Some(Value::String(name)) => Priority::parse(&name),
        Some(_) => None,
    };
    match priority {
        None => invalid(ErrorCode::InvalidValue, "priority must be `low`, `normal` or `high`".to_owned()),
        Some(asked) if asked > highest => invalid(
            ErrorCode::NotAllowed,
            format!("this API key's jobs have at most the priority `{}`", highest.name()),
        ),
        Some(asked) => Ok(asked),
    }
}

fn accepted(view: &JobView) -> Response {
    with_location(json(StatusCode::ACCEPTED, view), &format!("/v1/jobs/{}", view.id))
}

/// The response to a request that was sent before.
fn repeated(jobs: &Jobs, job: &str) -> Result<Response, ApiError> {
    let mut response = accepted(&JobView::find_if(jobs, job, |_| true)?);
    response.headers_mut().insert("idempotency-replayed", HeaderValue::from_static("true"));
    Ok(response)
}

fn other_request() -> ApiError {
    let message = "this Idempotency-Key was used for another request; choose a new one for every request";
    ApiError::new(ErrorCode::IdempotencyKey, message)
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
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/jobs", tag = "jobs", params(JobListParams), responses((status = 200, body = JobList))))]
pub(crate) async fn list(
    State(jobs): State<Jobs>,
    caller: Caller,
    Query(params): Query<JobListParams>,
) -> Result<Response, ApiError> {
    let limit = checked_limit(params.limit, 50, 1000)?;
    reply(move || {
        let rows = jobs.stored_jobs(limit, caller.only())?;
        let view = |job: Job| match jobs.live(&job.id) {
            Some(live) => Ok(JobView::from_live(&jobs, &live, &live.snapshot())),
            None => JobView::from_stored(&jobs, job),
        };
        let data = rows.into_iter().map(view).collect::<Result<_, ApiError>>()?;
        Ok(JobList { data })
    })
    .await
}

/// Returns a job.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses((status = 200, body = JobView))))]
pub(crate) async fn status(
    State(jobs): State<Jobs>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &JobView::load(&jobs, id, caller).await?))
}

/// Returns a job once it is done; 409 before.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/jobs/{id}/result", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, body = JobView),
    (status = "4XX", description = "Not found, or not done", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn result(
    State(jobs): State<Jobs>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let view = JobView::load(&jobs, id, caller).await?;
    let conflict =
        |code, message: String| Err(ApiError::new(code, message).with_status(StatusCode::CONFLICT));
    match (view.status, &view.error) {
        (JobState::Done, _) => Ok(json(StatusCode::OK, &view)),
        (state, Some(error)) if state.is_final() => conflict(error.code, error.message.clone()),
        (state, _) => conflict(ErrorCode::NotDone, format!("the job is {}", state.name())),
    }
}

/// Cancels a queued or running job.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, description = "Cancelled, or will be within a step", body = JobView),
    (status = "4XX", description = "Not found, or already ended", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn cancel(
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let visible = intake.live(&id).is_some_and(|live| caller.sees(&live.client));
        let cancelled = visible && intake.cancel_now(&id)?;
        let view = JobView::find(intake.jobs(), &id, &caller)?;
        if cancelled {
            return Ok(json(StatusCode::OK, &view));
        }
        let message = format!("the job has already ended: {}", view.status.name());
        Err(ApiError::new(ErrorCode::AtItsEnd, message))
    })
    .await
}

//! Status endpoints: health, readiness, metrics, limits, sessions.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

use super::error::ApiError;
use super::{Caller, json, response, run_blocking};
use crate::http::auth::{Auth, set_cookie};
use crate::jobs::Jobs;
use crate::jobs::intake::Intake;
use crate::jobs::sessions::SESSION_AGE;
use crate::jobs::store::StoreError;
use crate::jobs::trainings::Trainings;

/// The status of the server.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ServerStatus {
    /// `ok`, `starting`, `stopping`, `storage`, `queue` or `model`.
    status: &'static str,
    /// What is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

impl ServerStatus {
    fn new(status: &'static str) -> ServerStatus {
        ServerStatus { status, message: None }
    }
}

/// Reports that the server is alive.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/healthz", tag = "server", responses((status = 200, body = ServerStatus))))]
pub(crate) async fn health() -> Response {
    json(StatusCode::OK, &ServerStatus::new("ok"))
}

/// Reports whether the model is loaded, jobs are processed and images can be stored.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/readyz", tag = "server", responses(
    (status = 200, body = ServerStatus),
    (status = 503, description = "Starting, stopping, the data folder is full or gone, or the queue of a fleet can't be used", body = ServerStatus),
)))]
pub(crate) async fn ready(State(jobs): State<Jobs>) -> Response {
    if !jobs.is_ready() {
        let status = if *jobs.closing.borrow() { "stopping" } else { "starting" };
        return json(StatusCode::SERVICE_UNAVAILABLE, &ServerStatus::new(status));
    }
    let check = run_blocking(move || {
        let checked = jobs.check_storage();
        let problem = checked.inspect_err(|error| tracing::error!(%error, "nothing can be stored")).err();
        Ok(problem.map(|problem| match problem {
            StoreError::Queue(reason) => ("queue", format!("the queue can't be used: {reason}")),
            StoreError::Model(reason) => ("model", format!("no model can be loaded: {reason}")),
            // The route is public: the path stays in the log.
            _ => ("storage", "the data folder is full or gone; the log says more".to_owned()),
        }))
    });
    match check.await {
        Ok(None) => json(StatusCode::OK, &ServerStatus::new("ok")),
        Ok(Some((status, message))) => {
            json(StatusCode::SERVICE_UNAVAILABLE, &ServerStatus { status, message: Some(message) })
        }
        Err(_) => json(StatusCode::SERVICE_UNAVAILABLE, &ServerStatus::new("storage")),
    }
}

/// Returns metrics in Prometheus' text format.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/metrics", tag = "server", responses(
    (status = 200, description = "Metrics", content_type = "text/plain"),
    (status = 403, description = "The key is not marked `admin`", body = super::error::ErrorBody),
)))]
pub(crate) async fn metrics(State(jobs): State<Jobs>, caller: Caller) -> Result<Response, ApiError> {
    caller.require_admin()?;
    let text = run_blocking(move || {
        let mut text = jobs.metrics.text(&jobs.stats());
        jobs.health.metrics(&mut text);
        Ok(text.0)
    })
    .await?;
    Ok(response(StatusCode::OK, "text/plain; version=0.0.4", text.into()))
}

/// A list of names.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct NameList {
    /// The names.
    data: Vec<String>,
}

/// Lists the LoRAs that requests can name.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/loras", tag = "server", responses((status = 200, body = NameList))))]
pub(crate) async fn loras(State(jobs): State<Jobs>) -> Response {
    json(StatusCode::OK, &NameList { data: jobs.catalogue.loras() })
}

/// Lists the VAEs that requests can name instead of a model's own.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/vaes", tag = "server", responses((status = 200, body = NameList))))]
pub(crate) async fn vaes(State(jobs): State<Jobs>) -> Response {
    json(StatusCode::OK, &NameList { data: jobs.catalogue.vaes() })
}

/// The server's version, limits and queue.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct About {
    /// The version of Kiln.
    version: &'static str,
    /// Number of queued jobs.
    waiting: usize,
    /// Maximum number of queued jobs.
    capacity: usize,
    /// Maximum width and height in pixels.
    side: u32,
    /// Maximum pixels of an image.
    pixels: u64,
    /// The factors that images can be upscaled by.
    upscale: [u32; 2],
    /// Maximum pixels of an upscaled image.
    upscaled_pixels: u64,
    /// Maximum number of steps.
    steps: u32,
    /// Maximum images of one job.
    images: u32,
    /// Maximum input images of one job.
    references: usize,
    /// Maximum bytes of a prompt.
    prompt: usize,
    /// Maximum of `max_tokens`, the length a prompt is padded to.
    tokens: u32,
    /// The name of the caller's API key; absent on a server without keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// Whether the caller sees everybody's jobs and images.
    admin: bool,
    /// Whether the caller may train LoRAs.
    train: bool,
    /// Whether image files are marked as made by a model.
    ai_mark: bool,
    /// The label of GB 45438 that they have, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    aigc_label: Option<String>,
    /// Whom the certificate names that image files are signed with.
    #[serde(skip_serializing_if = "Option::is_none")]
    signed_by: Option<String>,
    /// The invisible watermark of image files, 8 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    watermark: Option<String>,
    /// Whether `/v1/verify` checks credentials; else it says whether there are any.
    verifies: bool,
}

/// Returns the server's version, limits and queue length.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/about", tag = "server", responses((status = 200, body = About))))]
pub(crate) async fn about(
    State(jobs): State<Jobs>,
    State(trainings): State<Option<Arc<Trainings>>>,
    caller: Caller,
) -> Response {
    let limits = &jobs.config.limits;
    let about = About {
        version: env!("CARGO_PKG_VERSION"),
        waiting: jobs.queued_count(),
        capacity: limits.queue,
        side: limits.side,
        pixels: limits.pixels,
        upscale: crate::jobs::limits::UPSCALE_FACTORS,
        upscaled_pixels: limits.upscaled_pixels,
        steps: limits.steps,
        images: limits.images,
        references: limits.references,
        prompt: limits.prompt,
        tokens: limits.tokens,
        key: caller.key.as_ref().map(|key| key.name.clone()),
        admin: caller.admin,
        train: trainings.is_some() && caller.may_train(),
        ai_mark: jobs.config.embedded.ai_mark,
        aigc_label: jobs.config.embedded.aigc_label.clone(),
        watermark: jobs.config.embedded.watermark.map(|payload| payload.to_string()),
        verifies: kiln_credentials::CAN_VERIFY,
        signed_by: jobs.config.embedded.credentials.as_ref().map(|own| own.signer.name().to_owned()),
    };
    json(StatusCode::OK, &about)
}

/// Opens a session for a browser that sends the API key: sets a cookie that scripts can't read.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/session", tag = "server", responses(
    (status = 200, body = ServerStatus),
    (status = 401, description = "Missing or wrong API key", body = super::error::ErrorBody),
)))]
pub(crate) async fn session(
    State(auth): State<Arc<Auth>>,
    State(intake): State<Intake>,
    caller: Caller,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let response = json(StatusCode::OK, &ServerStatus::new("ok"));
    // A session opens no further one: it would outlive its own end.
    let Some(key) = caller.key.filter(|_| Auth::carries_key(&headers)) else { return Ok(response) };
    let secret = run_blocking(move || {
        let (secret, session, replaced) = auth.open_session(&key);
        let stored = replaced.map_or(Ok(()), |replaced| intake.keeping.delete_session(&replaced));
        // On a full disk the session lasts until the server stops.
        if let Err(error) = stored.and_then(|()| intake.keeping.insert_session(&session)) {
            tracing::warn!(%error, "failed to store a session");
        }
        Ok(secret)
    });
    Ok(with_cookie(response, &set_cookie(&secret.await?, SESSION_AGE, caller.secure)))
}

/// Ends the session of the browser that sends this.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/session", tag = "server", responses(
    (status = 200, body = ServerStatus),
    (status = 401, description = "No session", body = super::error::ErrorBody),
)))]
pub(crate) async fn logout(
    State(auth): State<Arc<Auth>>,
    State(intake): State<Intake>,
    caller: Caller,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    run_blocking(move || match auth.close_session(&headers, caller.secure) {
        Some(session) => intake.keeping.delete_session(&session).map_err(ApiError::from),
        None => Ok(()),
    })
    .await?;
    let response = json(StatusCode::OK, &ServerStatus::new("ok"));
    Ok(with_cookie(response, &set_cookie("", Duration::ZERO, caller.secure)))
}

fn with_cookie(mut response: Response, cookie: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(cookie) {
        response.headers_mut().insert(header::SET_COOKIE, value);
    }
    response
}

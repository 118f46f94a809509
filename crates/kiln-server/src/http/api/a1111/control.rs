//! Watching and stopping the running job.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::http::api::fields::Fields;
use crate::http::api::{Caller, Query, json};
use crate::jobs::intake::Intake;
use crate::jobs::job::{Api, JobState};
use crate::jobs::live::LiveJob;

/// The progress of the running job, in A1111's format.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ProgressResponse {
    /// From 0 to 1.
    progress: f32,
    /// Estimated seconds left.
    eta_relative: f32,
    /// The job's id, steps and images.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    state: Value,
    /// A preview as base64.
    current_image: Option<String>,
    /// The current phase.
    textinfo: Option<String>,
}

/// The parameters of a progress request.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub(crate) struct ProgressParams {
    /// Whether to leave out the preview.
    skip_current_image: Option<bool>,
}

/// Returns the progress of the running job.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/sdapi/v1/progress", tag = "a1111", params(ProgressParams), responses((status = 200, body = ProgressResponse))))]
pub(crate) async fn progress(
    State(intake): State<Intake>,
    caller: Caller,
    Query(params): Query<ProgressParams>,
) -> Response {
    let own = |live: &LiveJob| caller.owns(&live.client) && live.state() == JobState::Running;
    let running = intake.active().into_iter().find(|live| own(live));
    let snapshot = running.as_ref().map(|live| live.snapshot()).unwrap_or_default();
    let with_preview = params.skip_current_image != Some(true);
    if let Some(live) = running.as_ref().filter(|_| with_preview) {
        live.poll_preview();
    }
    let preview = snapshot.preview.as_ref().filter(|_| with_preview);
    let image = running.as_ref().zip(preview).and_then(|(live, preview)| {
        intake.encode_preview(&preview.image, kiln_image::Format::Png.into(), &live.request).ok()
    });
    let progress = &snapshot.progress;
    json(
        StatusCode::OK,
        &ProgressResponse {
            progress: progress.fraction,
            eta_relative: snapshot.time_left.unwrap_or(0.0),
            state: serde_json::json!({
                "skipped": false,
                "interrupted": false,
                "job": running.as_ref().map_or("", |live| &live.id),
                "job_count": i32::from(running.is_some()),
                "job_no": progress.image,
                "sampling_step": progress.step,
                "sampling_steps": progress.steps,
            }),
            current_image: image.map(|bytes| BASE64_STANDARD.encode(bytes)),
            textinfo: (snapshot.state == JobState::Running).then(|| progress.phase.name().to_owned()),
        },
    )
}

/// Stops the running jobs that were submitted through this API. Each returns its finished images, and the unfinished one
/// as it is.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/interrupt", tag = "a1111", responses((status = 200, description = "Done"))))]
pub(crate) async fn interrupt(State(intake): State<Intake>, caller: Caller) -> Response {
    let is_running = |live: &LiveJob| live.api == Api::A1111 && live.state() == JobState::Running;
    let own = |live: &LiveJob| is_running(live) && caller.owns(&live.client);
    for live in intake.active().iter().filter(|live| own(live)) {
        // Once the steps have begun, the next preview is the unfinished image.
        if intake.config.check.is_some() || !live.stop_with_preview() {
            intake.cancel(&live.id);
        }
    }
    json(StatusCode::OK, &Fields::new())
}

/// Does the same as `interrupt`: images of a job are generated together.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/sdapi/v1/skip", tag = "a1111", responses((status = 200, description = "Done"))))]
pub(crate) async fn skip(intake: State<Intake>, caller: Caller) -> Response {
    interrupt(intake, caller).await
}

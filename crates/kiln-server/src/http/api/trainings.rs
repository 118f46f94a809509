//! Trainings of LoRAs: start, list, follow, cancel, resume, delete.

use std::sync::Arc;

use axum::extract::{FromRef, FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use kiln_train::TrainRequest;
use serde::{Deserialize, Serialize};

use super::body::Json;
use super::error::ApiError;
use super::fields::{Fields, parse_fields};
use super::file::file_response;
use super::{Caller, Path, cached_while_valid, json, reply, run_blocking, with_location};
use crate::jobs::error::ErrorCode;
use crate::jobs::intake::Intake;
use crate::jobs::trainer::TrainableModel;
use crate::jobs::trainings::{
    LossPoint, Training, TrainingCheck, TrainingImage, TrainingSnapshot, TrainingState, Trainings, thin,
};

/// The most points of a loss curve in a response.
const MAX_POINTS: usize = 500;

/// A training.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct TrainingView {
    /// Its id.
    id: String,
    /// `queued`, `preparing`, `running`, `done`, `failed`, `cancelled` or `interrupted`.
    status: TrainingState,
    /// Whether it makes way for image jobs.
    paused: bool,
    /// Unfinished trainings before this one, while it is queued.
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    /// When it was submitted, in milliseconds since 1970.
    created: i64,
    /// When it ended.
    finished: Option<i64>,
    /// Its settings, complete.
    request: TrainRequest,
    /// The number of its images.
    images: usize,
    /// What the check of the images found, and the cost.
    check: TrainingCheck,
    /// What is being prepared.
    #[serde(skip_serializing_if = "Option::is_none")]
    preparing: Option<Preparation>,
    /// Steps done.
    step: u64,
    /// All steps.
    steps: u64,
    /// The smoothed loss.
    loss: Option<f32>,
    /// Seconds of a step.
    seconds_per_step: Option<f32>,
    /// Seconds until it is done.
    seconds_left: Option<f32>,
    /// What the user should know.
    notes: Vec<String>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<TrainingError>,
    /// The name of the finished LoRA, for requests.
    lora: Option<String>,
    /// Sample images.
    samples: Vec<TrainingSample>,
    /// The loss curve: steps, their losses (means of neighbours if there are many) and smoothed losses.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<Vec<f32>>))]
    losses: Vec<LossPoint>,
}

/// Something that is prepared.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
struct Preparation {
    /// What.
    what: String,
    /// So many are done.
    done: usize,
    /// Of so many.
    total: usize,
}

/// Why a training failed.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
struct TrainingError {
    /// A stable code for programs.
    code: String,
    /// A message for people.
    message: String,
}

/// Sample images of a step.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
struct TrainingSample {
    /// The step.
    step: u64,
    /// The URL of the images beside each other, a PNG.
    url: String,
}

impl TrainingView {
    /// The view without losses and samples.
    pub(super) fn new(trainings: &Trainings, training: &Training, s: &TrainingSnapshot) -> TrainingView {
        let steps = training.request.step_count();
        let left = |seconds: f32| seconds * steps.saturating_sub(s.step) as f32;
        TrainingView {
            id: training.id.clone(),
            status: s.state,
            paused: s.paused,
            position: (s.state == TrainingState::Queued).then(|| trainings.position(&training.id)),
            created: training.created,
            finished: s.finished,
            request: training.request.clone(),
            images: training.images,
            check: training.check.clone(),
            preparing: s.preparing.clone().map(|(what, done, total)| Preparation { what, done, total }),
            step: s.step,
            steps,
            loss: s.loss,
            seconds_per_step: s.seconds,
            seconds_left: s.seconds.map(left),
            notes: s.notes.clone(),
            error: s.error.clone().map(|(code, message)| TrainingError { code, message }),
            lora: s.lora.clone(),
            samples: Vec::new(),
            losses: Vec::new(),
        }
    }

    /// Adds what the training has written. Reads its files.
    pub(super) fn with_files(mut self, trainings: &Trainings, training: &Training) -> TrainingView {
        let files = trainings.trainer.files(&training.run_path());
        let running = training.losses_after(0);
        self.losses = thin(if running.is_empty() { &files.losses } else { &running }, MAX_POINTS);
        self.loss = self.loss.or(self.losses.last().map(|point| point.2));
        self.samples = samples(training, &files.samples);
        self
    }

    pub(super) fn with_losses(self, losses: &[LossPoint]) -> TrainingView {
        TrainingView { losses: thin(losses, MAX_POINTS), ..self }
    }

    pub(super) fn with_samples(self, trainings: &Trainings, training: &Training) -> TrainingView {
        let files = trainings.trainer.files(&training.run_path());
        TrainingView { samples: samples(training, &files.samples), ..self }
    }
}

fn samples(training: &Training, files: &[(u64, std::path::PathBuf)]) -> Vec<TrainingSample> {
    let sample = |(step, _): &(u64, _)| TrainingSample {
        step: *step,
        url: format!("/v1/trainings/{}/samples/{step}", training.id),
    };
    files.iter().map(sample).collect()
}

/// The trainings of a server that allows them to this caller.
pub(super) fn allowed<'t>(
    trainings: &'t Option<Arc<Trainings>>,
    caller: &Caller,
) -> Result<&'t Arc<Trainings>, ApiError> {
    let off = || {
        let message = "training is off on this server; its operator allows it with `kiln serve --train`";
        ApiError::new(ErrorCode::TrainingOff, message)
    };
    let trainings = trainings.as_ref().ok_or_else(off)?;
    if !caller.may_train() {
        let message = "this API key may not train; keys marked `train` or `admin` may";
        return Err(ApiError::new(ErrorCode::TrainingNotAllowed, message));
    }
    Ok(trainings)
}

/// What [`allowed`] found, and the caller.
pub(super) struct Allowed {
    pub(super) trainings: Arc<Trainings>,
    caller: Caller,
}

impl<S: Sync> FromRequestParts<S> for Allowed
where
    Option<Arc<Trainings>>: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Allowed, ApiError> {
        let caller = Caller::of(parts)?.clone();
        let trainings = Option::from_ref(state);
        let trainings = Arc::clone(allowed(&trainings, &caller)?);
        Ok(Allowed { trainings, caller })
    }
}

impl Allowed {
    /// A training that the caller may see.
    pub(super) fn find(&self, id: &str) -> Result<Arc<Training>, ApiError> {
        let training = self.trainings.find(id).filter(|training| self.caller.sees(&training.client));
        training.ok_or_else(|| ApiError::not_found("training", id))
    }

    fn view(&self, training: &Training) -> TrainingView {
        TrainingView::new(&self.trainings, training, &training.snapshot())
    }
}

/// What can be trained.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct TrainingOptions {
    /// The base models. Distilled ones are left out: training undoes their distillation.
    models: Vec<TrainableModel>,
}

/// Returns the base models that can be trained on, with the settings of their presets.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/trainings/options", tag = "trainings", responses(
    (status = 200, body = TrainingOptions),
    (status = 403, description = "Training is off, or the key may not train", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn options(allowed: Allowed) -> Result<Response, ApiError> {
    reply(move || Ok(TrainingOptions { models: allowed.trainings.trainer.models() })).await
}

/// A list of trainings.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct TrainingList {
    /// The trainings, newest first, without losses and samples.
    data: Vec<TrainingView>,
}

/// Lists the trainings, newest first: a key's own, an admin's all.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/trainings", tag = "trainings", responses(
    (status = 200, body = TrainingList),
    (status = 403, description = "Training is off, or the key may not train", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn list(allowed: Allowed) -> Result<Response, ApiError> {
    let all = allowed.trainings.all();
    let seen = all.iter().filter(|training| allowed.caller.sees(&training.client));
    let data = seen.map(|training| allowed.view(training)).collect();
    Ok(json(StatusCode::OK, &TrainingList { data }))
}

/// A training to start: its settings and images.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct NewTraining {
    /// The settings.
    #[cfg_attr(feature = "schema", schema(value_type = TrainRequest))]
    #[serde(alias = "order")]
    request: Fields,
    /// The images with their captions. Upload them to `/v1/inputs` first, one by one.
    #[serde(alias = "pictures")]
    images: Vec<TrainingImage>,
}

/// Starts a training: the images are checked, then it is queued behind image jobs and other trainings.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/trainings", tag = "trainings", request_body = NewTraining, responses(
    (status = 201, description = "Queued", body = TrainingView),
    (status = "4XX", description = "Not started: an image, caption or setting is unusable", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn start(
    allowed: Allowed,
    State(intake): State<Intake>,
    Json(NewTraining { request, images }, permit): Json<NewTraining>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let Allowed { trainings, caller } = &allowed;
        let training = intake.accept_training(trainings, parse_fields(&request)?, images, caller)?;
        drop(permit);
        let location = format!("/v1/trainings/{}", training.id);
        Ok(with_location(json(StatusCode::CREATED, &allowed.view(&training)), &location))
    })
    .await
}

/// Checks a training without starting it: warnings about the images, and the cost.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/trainings/check", tag = "trainings", request_body = NewTraining, responses(
    (status = 200, body = TrainingCheck),
    (status = "4XX", description = "It could not start", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn check(
    allowed: Allowed,
    State(intake): State<Intake>,
    Json(NewTraining { request, images }, permit): Json<NewTraining>,
) -> Result<Response, ApiError> {
    reply(move || {
        let Allowed { trainings, caller } = &allowed;
        let check = intake.check_training(trainings, parse_fields(&request)?, images, caller)?;
        drop(permit);
        Ok(check)
    })
    .await
}

/// Returns a training with its loss curve and samples.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/trainings/{id}", tag = "trainings", params(("id" = String, Path)), responses((status = 200, body = TrainingView))))]
pub(crate) async fn details(allowed: Allowed, Path(id): Path<String>) -> Result<Response, ApiError> {
    reply(move || {
        let training = allowed.find(&id)?;
        Ok(allowed.view(&training).with_files(&allowed.trainings, &training))
    })
    .await
}

/// Cancels a training. One that has begun saves a checkpoint after its step; it can be resumed.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/trainings/{id}/cancel", tag = "trainings", params(("id" = String, Path)), responses(
    (status = 202, description = "Will stop", body = TrainingView),
    (status = 409, description = "It has ended", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn cancel(allowed: Allowed, Path(id): Path<String>) -> Result<Response, ApiError> {
    change(allowed, id, |trainings, training, _| {
        if trainings.cancel(training) { Ok(()) } else { Err(conflict("the training has ended")) }
    })
    .await
}

/// Resumes a training that was cancelled, interrupted or failed, from its last checkpoint.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/trainings/{id}/resume", tag = "trainings", params(("id" = String, Path)), responses(
    (status = 202, description = "Queued", body = TrainingView),
    (status = 409, description = "It is done, or has not ended", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn resume(allowed: Allowed, Path(id): Path<String>) -> Result<Response, ApiError> {
    change(allowed, id, |trainings, training, caller| {
        let message = "only a training that was cancelled, interrupted or failed can be resumed";
        if trainings.resume(training, caller)? { Ok(()) } else { Err(conflict(message)) }
    })
    .await
}

async fn change(
    allowed: Allowed,
    id: String,
    change: impl FnOnce(&Trainings, &Training, &Caller) -> Result<(), ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let training = allowed.find(&id)?;
        change(&allowed.trainings, &training, &allowed.caller)?;
        Ok(json(StatusCode::ACCEPTED, &allowed.view(&training)))
    })
    .await
}

fn conflict(message: &str) -> ApiError {
    ApiError::new(ErrorCode::WrongState, message)
}

/// Deletes a training that has ended: its images, checkpoints and samples. Its LoRA stays.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/trainings/{id}", tag = "trainings", params(("id" = String, Path)), responses(
    (status = 200, description = "Deleted", body = TrainingList),
    (status = 409, description = "It has not ended: cancel it first", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn delete(allowed: Allowed, Path(id): Path<String>) -> Result<Response, ApiError> {
    reply(move || {
        let training = allowed.find(&id)?;
        let failed = |error: std::io::Error| {
            tracing::error!(%error, training = id, "failed to delete a training");
            ApiError::new(ErrorCode::Storage, "the training can't be deleted")
        };
        if !allowed.trainings.delete(&training).map_err(failed)? {
            return Err(conflict("the training has not ended; cancel it first"));
        }
        tracing::info!(training = id, "training deleted");
        Ok(TrainingList { data: Vec::new() })
    })
    .await
}

/// Returns the sample images of a step, beside each other, as PNG.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/trainings/{id}/samples/{step}", tag = "trainings",
    params(("id" = String, Path), ("step" = u64, Path)), responses((status = 200, description = "The file", content_type = "image/png"))))]
pub(crate) async fn sample(
    allowed: Allowed,
    headers: HeaderMap,
    Path((id, step)): Path<(String, u64)>,
) -> Result<Response, ApiError> {
    run_blocking(move || {
        let training = allowed.find(&id)?;
        let missing = || ApiError::not_found("sample", &step.to_string());
        let files = allowed.trainings.trainer.files(&training.run_path());
        let (_, path) = files.samples.into_iter().find(|(at, _)| *at == step).ok_or_else(missing)?;
        file_response(&path, "image/png", None, &headers).map(cached_while_valid).map_err(|_| missing())
    })
    .await
}

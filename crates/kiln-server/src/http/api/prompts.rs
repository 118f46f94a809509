//! Rewriting prompts before they are used.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kiln_engine::{FileRef, Request, upsample};
use serde::{Deserialize, Serialize};

use super::body::Json;
use super::error::ApiError;
use super::{Caller, json, run_blocking};
use crate::jobs::error::JobError;
use crate::jobs::generator::JobInputs;
use crate::jobs::intake::Intake;

/// A prompt to rewrite.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct PromptToRewrite {
    /// The prompt.
    prompt: String,
    /// Reference images of an edit, which the language model sees, as in a job.
    #[serde(default)]
    references: Vec<String>,
    /// The model that the prompt is for; its text encoder rewrites it unless the server names another.
    model: Option<String>,
    /// How freely words are chosen, above 0 and at most 5; 0.15 if absent.
    #[cfg_attr(feature = "schema", schema(exclusive_minimum = 0, maximum = 5))]
    temperature: Option<f32>,
    /// Equal seeds give equal prompts; 0 if absent.
    seed: Option<u64>,
}

/// A rewritten prompt.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct RewrittenPrompt {
    /// The new prompt, to be used or edited.
    prompt: String,
    /// The prompt as it was. Given to a job as `original_prompt`, it is kept in the image's recipe.
    original_prompt: String,
}

/// Rewrites a prompt to a more detailed one with a language model. The images of an edit are seen, too.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/prompts/upsample", tag = "jobs", request_body = PromptToRewrite, responses(
    (status = 200, description = "The new prompt", body = RewrittenPrompt),
    (status = "4XX", description = "Not rewritten: the model can't, or another prompt is being rewritten", body = crate::http::api::error::ErrorBody),
    (status = "5XX", description = "The language model or the service failed", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn upsample(
    State(intake): State<Intake>,
    caller: Caller,
    Json(body, _permit): Json<PromptToRewrite>,
) -> Result<Response, ApiError> {
    // Dropped with this future when the client disconnects.
    let connected = Arc::new(());
    let client = Arc::downgrade(&connected);
    let rewritten = run_blocking(move || {
        let PromptToRewrite { prompt, references, model, temperature, seed } = body;
        let temperature = temperature.unwrap_or(upsample::DEFAULT_TEMPERATURE);
        upsample::check_temperature(temperature).map_err(|error| JobError::explained(&error))?;
        let request = Request {
            references: references.into_iter().map(FileRef::from).collect(),
            model: model.map(Into::into),
            seed: vec![seed.unwrap_or(0)],
            ..Request::new(&prompt)
        };
        let request = intake.accept_request(request, &caller)?;
        let job = JobInputs { request: &request, source: intake.jobs() };
        let rewritten = intake.catalogue.rewrite_prompt(&job, temperature, &|| client.strong_count() == 0)?;
        Ok(RewrittenPrompt { prompt: rewritten, original_prompt: prompt })
    });
    let rewritten = rewritten.await?;
    drop(connected);
    Ok(json(StatusCode::OK, &rewritten))
}

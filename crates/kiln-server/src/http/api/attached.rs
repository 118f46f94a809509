//! Work that a request waits for: blocking calls, and jobs.

use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use axum::response::Response;
use kiln_base::lock;
use kiln_engine::Request;
use serde::Serialize;

use super::error::ApiError;
use super::json;
use crate::http::body_budget::BodyPermit;
use crate::jobs::caller::Caller;
use crate::jobs::error::ErrorCode;
use crate::jobs::intake::{AttachedJob, Intake, NewJob};
use crate::jobs::job::Api;
use crate::jobs::live::JobSnapshot;

/// Runs blocking work away from the threads that serve requests.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    // The request's span goes along: what `work` logs has the request's id.
    let span = tracing::Span::current();
    let result = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&result);
    // One type of task for all handlers: tokio's code is compiled for each type.
    let task: Box<dyn FnOnce() + Send> = Box::new(move || *lock(&slot) = Some(span.in_scope(work)));
    let _ = tokio::task::spawn_blocking(task).await;
    let result = lock(&result).take();
    match result {
        Some(result) => result,
        None => {
            let message = "internal error: handling the request panicked";
            Err(ApiError::new(ErrorCode::Panicked, message))
        }
    }
}

/// [`run_blocking`], with the result of the work as the response.
pub(crate) async fn reply<T: Serialize + Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &run_blocking(work).await?))
}

/// Submits a job that the client waits for on this connection. The memory of its body is given back when its images are
/// stored, even if the client disconnects before that.
pub(crate) async fn submit_attached(
    intake: &Intake,
    request: Request,
    caller: &Caller,
    api: Api,
    permit: BodyPermit,
) -> Result<AttachedJob, ApiError> {
    let (intake, caller) = (intake.clone(), caller.clone());
    run_blocking(move || {
        let request = intake.accept_request(request, &caller).map_err(ApiError::from)?;
        drop(permit);
        let live = intake.submit(NewJob::attached(request, caller, api)).map_err(ApiError::from)?;
        // Attach here: if the client disconnects while this runs, the job is still cancelled.
        Ok(AttachedJob::new(&intake, live))
    })
    .await
}

/// Waits for the end of a job and returns its last snapshot.
pub(crate) async fn wait_until_ended(attached: &AttachedJob) -> JobSnapshot {
    let mut watch = attached.live.watch();
    let end = watch.wait_for(|snapshot| snapshot.state.is_final()).await;
    end.map_or_else(|_| attached.live.snapshot(), |snapshot| snapshot.clone())
}

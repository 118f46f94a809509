//! A client's part of the queue: list, reorder, cancel all.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::body::Json;
use super::error::ApiError;
use super::job_view::JobView;
use super::{Caller, json, reply};
use crate::jobs::intake::Intake;

/// The unfinished jobs of a client.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct QueueView {
    /// Its jobs: running ones, then queued ones in their order.
    data: Vec<JobView>,
    /// The number of other clients' unfinished jobs.
    others: usize,
}

impl QueueView {
    fn new(intake: &Intake, client: &str) -> QueueView {
        let all = intake.unfinished();
        let own = all.iter().filter(|live| live.client == client);
        let data: Vec<JobView> = own.map(|live| JobView::from_live(intake, live, &live.snapshot())).collect();
        QueueView { others: all.len() - data.len(), data }
    }
}

/// Returns the unfinished jobs of this client, and how many others have.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/queue", tag = "jobs", operation_id = "queue", responses((status = 200, description = "The queue", body = QueueView))))]
pub(crate) async fn list(State(intake): State<Intake>, caller: Caller) -> Response {
    json(StatusCode::OK, &QueueView::new(&intake, &caller.client))
}

/// A new order of queued jobs.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct NewOrder {
    /// The ids of queued jobs of this client. They exchange their places; jobs that have started are ignored.
    order: Vec<String>,
}

/// Reorders queued jobs of this client. Other clients' jobs keep their places.
#[cfg_attr(feature = "schema", utoipa::path(put, path = "/v1/queue", tag = "jobs", request_body = NewOrder, responses(
    (status = 200, description = "The queue in its new order", body = QueueView),
    (status = "4XX", description = "Not reordered", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn reorder(
    State(intake): State<Intake>,
    caller: Caller,
    Json(NewOrder { order }, _permit): Json<NewOrder>,
) -> Result<Response, ApiError> {
    let limit = intake.config.limits.queue;
    if order.len() > limit {
        let message = format!("the order names {} jobs, the queue holds {limit}", order.len());
        return Err(ApiError::invalid(message));
    }
    reply(move || {
        intake.reorder(&caller.client, &order)?;
        Ok(QueueView::new(&intake, &caller.client))
    })
    .await
}

/// The result of cancelling all jobs.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct Cancelled {
    /// The number of cancelled jobs.
    cancelled: usize,
}

/// Cancels all unfinished jobs of this client.
#[cfg_attr(feature = "schema", utoipa::path(delete, path = "/v1/queue", tag = "jobs", responses((status = 200, description = "Cancelled", body = Cancelled))))]
pub(crate) async fn cancel_all(State(intake): State<Intake>, caller: Caller) -> Result<Response, ApiError> {
    reply(move || {
        // Waiting jobs first, so that none of them starts when the running one ends.
        let own = intake.unfinished().into_iter().rev().filter(|live| live.client == caller.client);
        let mut cancelled = 0;
        for live in own {
            cancelled += usize::from(intake.cancel_now(&live.id)?);
        }
        Ok(Cancelled { cancelled })
    })
    .await
}

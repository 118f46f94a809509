//! Plots: one order for a grid of images that differ in one or two settings.
//!
//! Every cell is a job of its own, so cells are batched, cancelled and resumed like all jobs.

use std::num::NonZeroUsize;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kiln_base::hex;
use kiln_engine::Request;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::body::Json;
use super::error::ApiError;
use super::fields::{Fields, parse_request};
use super::job_view::JobView;
use super::{Caller, Path, json, reply, run_blocking};
use crate::jobs::error::ErrorCode;
use crate::jobs::intake::{Intake, NewJob};
use crate::jobs::job::Api;
use crate::jobs::keys::Quotas;
use crate::jobs::random::{random_bytes, random_seed};
use crate::jobs::store::{PlotRow, now};

/// Fields of a request that an axis can vary.
const FIELDS: [&str; 7] = ["seed", "steps", "guidance", "strength", "model", "schedule", "prompt"];
/// How many plots are listed.
const LISTED: u32 = 50;

/// A setting and its values.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct Axis {
    /// The field of the request: `seed`, `steps`, `guidance`, `strength`, `model`, `schedule` or `prompt`.
    field: String,
    /// Its values.
    values: Vec<Value>,
}

/// A grid of images.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct NewPlot {
    /// The request that all images share. Its `n` is ignored: a cell is one image.
    #[cfg_attr(feature = "schema", schema(value_type = Request))]
    #[serde(alias = "order")]
    request: Fields,
    /// What differs from column to column.
    x: Axis,
    /// What differs from row to row.
    y: Option<Axis>,
}

#[derive(Serialize, Deserialize)]
struct Axes {
    x: Axis,
    y: Option<Axis>,
}

/// A grid of jobs.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct PlotView {
    /// Its id.
    id: String,
    /// When it was submitted, in milliseconds since 1970.
    created: i64,
    /// What differs from column to column.
    x: Axis,
    /// What differs from row to row.
    y: Option<Axis>,
    /// The jobs by row; null for one that was deleted since.
    rows: Vec<Vec<Option<JobView>>>,
}

/// A list of plots.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct PlotList {
    /// The plots, newest first.
    data: Vec<PlotSummary>,
}

/// A plot without its jobs.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct PlotSummary {
    /// Its id.
    id: String,
    /// When it was submitted, in milliseconds since 1970.
    created: i64,
    /// What differs from column to column.
    x: Axis,
    /// What differs from row to row.
    y: Option<Axis>,
}

/// Submits a grid of jobs: all of them, or none.
#[cfg_attr(feature = "schema", utoipa::path(post, path = "/v1/plots", tag = "jobs", operation_id = "submit_plot", request_body = NewPlot, responses(
    (status = 202, description = "The jobs are queued", body = PlotView),
    (status = "4XX", description = "No job is accepted", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn submit(
    State(intake): State<Intake>,
    caller: Caller,
    Json(plot, permit): Json<NewPlot>,
) -> Result<Response, ApiError> {
    let view = run_blocking(move || {
        let rows = requests(&intake, &plot, &caller)?;
        drop(permit);
        let jobs = submit_all(&intake, &caller, rows)?;
        let axes = Axes { x: plot.x, y: plot.y };
        let row = PlotRow {
            id: hex(random_bytes::<12>()),
            client: caller.client.clone(),
            created: now(),
            axes: to_json(&axes),
            jobs: to_json(&jobs),
        };
        if let Err(error) = intake.keeping.insert_plot(&row) {
            cancel_all(&intake, &jobs);
            return Err(error.into());
        }
        view(&intake, row, &caller)
    });
    Ok(json(StatusCode::ACCEPTED, &view.await?))
}

/// The checked requests of a plot's cells, by row.
fn requests(intake: &Intake, plot: &NewPlot, caller: &Caller) -> Result<Vec<Vec<Request>>, ApiError> {
    for axis in std::iter::once(&plot.x).chain(&plot.y) {
        if !FIELDS.contains(&axis.field.as_str()) {
            let message = format!("an axis can't vary `{}`; it can vary {}", axis.field, FIELDS.join(", "));
            return Err(ApiError::invalid(message));
        }
        if axis.values.is_empty() {
            return Err(ApiError::invalid(format!("the axis of `{}` has no values", axis.field)));
        }
    }
    if plot.y.as_ref().is_some_and(|y| y.field == plot.x.field) {
        return Err(ApiError::invalid(format!("both axes vary `{}`", plot.x.field)));
    }
    // One client may fill at most half of the queue, or what its key says.
    let Quotas { jobs, jobs_per_minute, .. } = caller.quotas;
    let quotas = [jobs.map(NonZeroUsize::get), jobs_per_minute.map(|jobs| jobs.get() as usize)];
    let limit = quotas.into_iter().flatten().fold(intake.config.limits.queue / 2, usize::min);
    let cells = cells(plot);
    if cells > limit {
        return Err(ApiError::invalid(format!("the plot has {cells} cells, the limit is {limit}")));
    }
    let mut shared = plot.request.clone();
    shared.remove("n");
    // Cells differ only in what their axes say.
    shared.entry("seed").or_insert_with(|| random_seed().into());
    let rows: Vec<Option<&Value>> =
        plot.y.as_ref().map_or(vec![None], |y| y.values.iter().map(Some).collect());
    let cell = |y: Option<&Value>, x: &Value| {
        let mut fields = shared.clone();
        fields.insert(plot.x.field.clone(), x.clone());
        if let (Some(axis), Some(y)) = (&plot.y, y) {
            fields.insert(axis.field.clone(), y.clone());
        }
        let request = parse_request(&fields)?;
        if request.image_count() != 1 {
            return Err(ApiError::invalid("a cell of a plot is one image: give one prompt and one seed"));
        }
        intake.accept_request(request, caller).map_err(ApiError::from)
    };
    rows.into_iter().map(|y| plot.x.values.iter().map(|x| cell(y, x)).collect()).collect()
}

fn cells(plot: &NewPlot) -> usize {
    plot.x.values.len().saturating_mul(plot.y.as_ref().map_or(1, |y| y.values.len()))
}

/// Submits these requests; cancels those that were accepted if one is not.
fn submit_all(
    intake: &Intake,
    caller: &Caller,
    rows: Vec<Vec<Request>>,
) -> Result<Vec<Vec<String>>, ApiError> {
    let mut ids: Vec<Vec<String>> = Vec::with_capacity(rows.len());
    for row in rows {
        ids.push(Vec::with_capacity(row.len()));
        for request in row {
            match intake.submit(NewJob::queued(request, caller.clone(), Api::Jobs)) {
                Ok(live) => ids.last_mut().into_iter().for_each(|row| row.push(live.id.clone())),
                Err(error) => {
                    cancel_all(intake, &ids);
                    return Err(error.into());
                }
            }
        }
    }
    Ok(ids)
}

fn cancel_all(intake: &Intake, ids: &[Vec<String>]) {
    for id in ids.iter().flatten() {
        if let Err(error) = intake.cancel_now(id) {
            tracing::error!(job = id, %error, "a job of a plot that was not accepted stays queued");
        }
    }
}

fn view(intake: &Intake, row: PlotRow, caller: &Caller) -> Result<PlotView, ApiError> {
    let Axes { x, y } = axes(&row)?;
    let ids: Vec<Vec<String>> = serde_json::from_str(&row.jobs).map_err(|_| unreadable(&row.id))?;
    let cells = |row: Vec<String>| row.iter().map(|id| JobView::find(intake, id, caller).ok()).collect();
    let rows = ids.into_iter().map(cells).collect();
    Ok(PlotView { id: row.id, created: row.created, x, y, rows })
}

fn axes(row: &PlotRow) -> Result<Axes, ApiError> {
    serde_json::from_str(&row.axes).map_err(|_| unreadable(&row.id))
}

fn unreadable(id: &str) -> ApiError {
    let message = format!("the plot `{id}` in the database is damaged");
    ApiError::new(ErrorCode::Storage, message).with_status(StatusCode::INTERNAL_SERVER_ERROR)
}

/// Strings, numbers and lists: serializing can't fail.
fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Lists the latest plots.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/plots", tag = "jobs", operation_id = "plots", responses((status = 200, description = "The plots", body = PlotList))))]
pub(crate) async fn list(State(intake): State<Intake>, caller: Caller) -> Result<Response, ApiError> {
    reply(move || {
        let summary = |row: PlotRow| {
            let Axes { x, y } = axes(&row).ok()?;
            Some(PlotSummary { id: row.id, created: row.created, x, y })
        };
        let plots = intake.store.plots(LISTED, caller.only())?;
        Ok(PlotList { data: plots.into_iter().filter_map(summary).collect() })
    })
    .await
}

/// Returns a plot with its jobs.
#[cfg_attr(feature = "schema", utoipa::path(get, path = "/v1/plots/{id}", operation_id = "plot", tag = "jobs", params(("id" = String, Path)), responses(
    (status = 200, description = "The plot", body = PlotView),
    (status = "4XX", description = "Not found", body = crate::http::api::error::ErrorBody),
)))]
pub(crate) async fn details(
    State(intake): State<Intake>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    reply(move || {
        let row = intake.store.plot(&id)?.filter(|row| caller.sees(&row.client));
        view(&intake, row.ok_or_else(|| ApiError::not_found("plot", &id))?, &caller)
    })
    .await
}

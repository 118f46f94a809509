//! A job as clients see it.

use kiln_engine::{Progress, Request};
use serde::Serialize;

use super::error::ApiError;
use super::image_view::ImageView;
use super::run_blocking;
use crate::jobs::Jobs;
use crate::jobs::caller::Caller;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::job::{Job, JobState};
use crate::jobs::live::{JobSnapshot, LiveJob};
use crate::jobs::priority::Priority;

/// A job.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct JobView {
    /// Its id.
    pub(super) id: String,
    /// `queued`, `running`, `done`, `failed` or `cancelled`.
    pub(super) status: JobState,
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
    pub(super) error: Option<ErrorView>,
    /// Its images that are finished.
    pub(crate) images: Vec<ImageView>,
    /// Messages about this job, such as adjusted settings.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    /// The request.
    request: Request,
}

/// Why a job failed.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ErrorView {
    /// A stable code for programs.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub(super) code: ErrorCode,
    /// A message for people.
    pub(super) message: String,
}

impl From<JobError> for ErrorView {
    fn from(error: JobError) -> ErrorView {
        ErrorView { code: error.code, message: error.message }
    }
}

/// The progress of a job.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub(crate) struct ProgressView {
    #[serde(flatten)]
    progress: Progress,
    /// Estimated seconds left, once known.
    time_left: Option<f32>,
}

impl JobView {
    pub(crate) fn from_live(jobs: &Jobs, live: &LiveJob, snapshot: &JobSnapshot) -> JobView {
        let error = snapshot.error.as_ref();
        JobView {
            id: live.id.clone(),
            status: snapshot.state,
            position: jobs.position(&live.id),
            priority: live.priority,
            progress: (snapshot.state == JobState::Running)
                .then_some(ProgressView { progress: snapshot.progress, time_left: snapshot.time_left }),
            created: live.created,
            started: None,
            finished: None,
            error: error.cloned().map(ErrorView::from),
            images: snapshot.images.iter().map(|image| ImageView::from(image.row.clone())).collect(),
            notes: snapshot.notes.clone(),
            request: live.request.clone(),
        }
    }

    pub(super) fn from_stored(jobs: &Jobs, job: Job) -> Result<JobView, ApiError> {
        let images = jobs.store.images_of(&job.id)?;
        Ok(JobView {
            status: job.state,
            position: None,
            priority: job.priority,
            progress: None,
            created: job.created,
            started: job.started,
            finished: job.finished,
            error: job.error.map(ErrorView::from),
            images: images.into_iter().map(ImageView::from).collect(),
            notes: job.notes,
            request: job.request,
            id: job.id,
        })
    }

    /// A job that the caller may see.
    pub(crate) fn find(jobs: &Jobs, id: &str, caller: &Caller) -> Result<JobView, ApiError> {
        JobView::find_if(jobs, id, |client| caller.sees(client))
    }

    /// A job, if `visible` accepts the client that submitted it.
    pub(crate) fn find_if(
        jobs: &Jobs,
        id: &str,
        visible: impl Fn(&str) -> bool,
    ) -> Result<JobView, ApiError> {
        if let Some(live) = jobs.live(id).filter(|live| visible(&live.client)) {
            return Ok(JobView::from_live(jobs, &live, &live.snapshot()));
        }
        let row = jobs.stored_job(id)?.filter(|row| visible(&row.client));
        JobView::from_stored(jobs, row.ok_or_else(|| ApiError::not_found("job", id))?)
    }

    /// The job as it is stored, which is its end even before the queue has forgotten it.
    pub(crate) fn stored(jobs: &Jobs, id: &str) -> Result<JobView, ApiError> {
        let row = jobs.stored_job(id)?.ok_or_else(|| ApiError::not_found("job", id))?;
        JobView::from_stored(jobs, row)
    }

    /// [`JobView::find`] away from the threads that serve requests.
    pub(crate) async fn load(jobs: &Jobs, id: String, caller: Caller) -> Result<JobView, ApiError> {
        let jobs = jobs.clone();
        run_blocking(move || JobView::find(&jobs, &id, &caller)).await
    }
}

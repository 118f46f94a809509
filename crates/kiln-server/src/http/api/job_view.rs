//! A job as clients see it.

use kiln_engine::{Phase, Progress, Request};
use serde::Serialize;

use super::error::ApiError;
use super::image_view::ImageView;
use super::run_blocking;
use crate::jobs::Jobs;
use crate::jobs::caller::Caller;
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
    pub(super) code: String,
    /// A message for people.
    pub(super) message: String,
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
    pub(crate) fn from_live(jobs: &Jobs, live: &LiveJob, snapshot: &JobSnapshot) -> JobView {
        let error = snapshot.error.as_ref();
        JobView {
            id: live.id.clone(),
            status: snapshot.state,
            position: jobs.position(&live.id),
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
            error: job.error.map(|(code, message)| ErrorView { code, message }),
            pictures: images.into_iter().map(ImageView::from).collect(),
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

//! A queued or running job, and the snapshots that its watchers see.
//! A watcher sees the latest snapshot; a slow one misses those in between, and nothing piles up.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kiln_engine::{Phase, Progress};
use kiln_image::RgbImage;
use tokio::sync::watch;

use crate::jobs::error::JobError;
use crate::jobs::job::{Job, JobState};
use crate::jobs::store::{ImageRow, now};

/// A saved image: its database row and the bytes of its file.
#[derive(Debug)]
pub(crate) struct SavedImage {
    pub(crate) row: ImageRow,
    pub(crate) bytes: Bytes,
}

/// An intermediate image.
#[derive(Debug)]
pub(crate) struct Preview {
    /// Sequence number in the attempt, from 1.
    pub(crate) number: u32,
    pub(crate) image: RgbImage,
}

/// The state of a job. Watchers get the latest snapshot; a slow watcher skips the ones in between.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobSnapshot {
    pub(crate) state: JobState,
    pub(crate) progress: Progress,
    /// Estimated seconds left.
    pub(crate) time_left: Option<f32>,
    pub(crate) notes: Vec<String>,
    pub(crate) preview: Option<Arc<Preview>>,
    pub(crate) images: Vec<Arc<SavedImage>>,
    pub(crate) error: Option<JobError>,
}

/// A job that has not ended: with what its watchers see, and what they ask for.
pub(crate) struct LiveJob {
    pub(crate) job: Arc<Job>,
    pub(crate) submitted: Instant,
    /// Set once it is planned: its decoded input images can be dropped.
    planned: AtomicBool,
    cancelled: AtomicBool,
    interrupted: AtomicBool,
    /// Stop at the next preview.
    stop_with_preview: AtomicBool,
    preview_watchers: AtomicUsize,
    /// When a preview was last polled, in milliseconds since 1970.
    last_preview_poll: AtomicI64,
    snapshot: watch::Sender<JobSnapshot>,
    /// Hears what watchers want, if another process generates the job.
    remote: OnceLock<Box<dyn Fn(WatchRequest) + Send + Sync>>,
}

/// What watchers want of a job that another process generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchRequest {
    Previews,
    StopAtPreview,
}

impl Deref for LiveJob {
    type Target = Job;

    fn deref(&self) -> &Job {
        &self.job
    }
}

impl LiveJob {
    pub(crate) fn new(job: Arc<Job>) -> LiveJob {
        LiveJob {
            job,
            submitted: Instant::now(),
            planned: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
            stop_with_preview: AtomicBool::new(false),
            preview_watchers: AtomicUsize::new(0),
            last_preview_poll: AtomicI64::new(0),
            snapshot: watch::Sender::new(JobSnapshot::default()),
            remote: OnceLock::new(),
        }
    }

    pub(crate) fn watch(&self) -> watch::Receiver<JobSnapshot> {
        self.snapshot.subscribe()
    }

    pub(crate) fn snapshot(&self) -> JobSnapshot {
        self.snapshot.borrow().clone()
    }

    pub(crate) fn state(&self) -> JobState {
        self.snapshot.borrow().state
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut JobSnapshot)) {
        self.snapshot.send_modify(change);
    }

    pub(crate) fn set_planned(&self) {
        self.planned.store(true, SeqCst);
    }

    pub(crate) fn is_planned(&self) -> bool {
        self.planned.load(SeqCst)
    }

    /// Asks the generator to stop.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, SeqCst);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(SeqCst)
    }

    /// Asks the generator to stop at the next preview, which stays in the last snapshot; `false` if there will be none.
    pub(crate) fn stop_with_preview(&self) -> bool {
        let in_steps = self.snapshot.borrow().progress.phase == Phase::Steps;
        self.stop_with_preview.fetch_or(in_steps, SeqCst);
        if in_steps {
            self.send(WatchRequest::StopAtPreview);
        }
        in_steps
    }

    pub(crate) fn stops_with_preview(&self) -> bool {
        self.stop_with_preview.load(SeqCst)
    }

    /// Asks the generator to stop; the job resumes at the next start of the server.
    pub(crate) fn interrupt(&self) {
        self.interrupted.store(true, SeqCst);
        self.cancel();
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.load(SeqCst)
    }

    /// Requests previews as long as the guard lives.
    pub(crate) fn watch_previews(self: &Arc<Self>) -> PreviewGuard {
        self.preview_watchers.fetch_add(1, SeqCst);
        self.send(WatchRequest::Previews);
        PreviewGuard(Arc::clone(self))
    }

    /// Requests previews for the next seconds, for clients that poll.
    pub(crate) fn poll_preview(&self) {
        self.last_preview_poll.store(now(), SeqCst);
        self.send(WatchRequest::Previews);
    }

    /// Another process generates the job: `tell` passes requests for previews on.
    pub(crate) fn set_remote(&self, tell: impl Fn(WatchRequest) + Send + Sync + 'static) {
        let _ = self.remote.set(Box::new(tell));
    }

    fn send(&self, request: WatchRequest) {
        if let Some(tell) = self.remote.get() {
            tell(request);
        }
    }

    pub(crate) fn wants_previews(&self) -> bool {
        const RECENT: Duration = Duration::from_secs(10);
        self.preview_watchers.load(SeqCst) > 0
            || self.stops_with_preview()
            || now() - self.last_preview_poll.load(SeqCst) < RECENT.as_millis() as i64
    }
}

/// Requests previews of a job while it lives; see [`LiveJob::watch_previews`].
pub(crate) struct PreviewGuard(Arc<LiveJob>);

impl Drop for PreviewGuard {
    fn drop(&mut self) {
        self.0.preview_watchers.fetch_sub(1, SeqCst);
    }
}

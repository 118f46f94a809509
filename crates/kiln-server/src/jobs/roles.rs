//! What a process does with jobs, one trait for each role. A server alone has all of them; a gateway takes jobs in and keeps
//! what its clients have, and a worker attempts jobs.

use std::sync::Arc;

use kiln_base::hex;

use crate::jobs::error::JobError;
use crate::jobs::job::JobEnd;
use crate::jobs::live::LiveJob;
use crate::jobs::random::random_bytes;
use crate::jobs::sessions::Session;
use crate::jobs::store::{Claim, GalleryLimits, IdempotencyKey, ImageRow, Marks, PlotRow, StoreError};
use crate::jobs::{Jobs, Slot};

type Result<T> = std::result::Result<T, StoreError>;

/// Why a job was not accepted.
#[derive(Debug)]
pub(crate) enum SubmitError {
    /// The queue is full, or this client's share of it.
    QueueFull {
        retry_after_seconds: u64,
        client_limit: bool,
    },
    /// This client submits jobs too fast.
    RateLimited {
        retry_after_seconds: u64,
    },
    Stopping,
    /// It could not be done: the images not signed, or the request not recorded.
    Refused(JobError),
    /// An earlier request has the same idempotency key. The id of its job, if it asked for the same.
    Repeated(Option<String>),
    Store(StoreError),
}

impl From<StoreError> for SubmitError {
    fn from(error: StoreError) -> SubmitError {
        SubmitError::Store(error)
    }
}

/// How a process stops.
pub(crate) trait Shutdown: Send + Sync {
    /// Takes no more jobs, and reports so to probes and watchers.
    fn close(&self);

    /// Whether there are jobs to wait for, at most for the grace period.
    fn is_awaited(&self, jobs: &Jobs) -> bool {
        !jobs.active().is_empty()
    }

    /// Tries to record what could not be recorded yet.
    fn record_ends(&self) {}
}

/// Takes jobs in, and changes those that have not ended.
pub(crate) trait Submitting: Shutdown {
    /// The id of a new job.
    fn new_id(&self, key: Option<&IdempotencyKey>) -> String {
        let _ = key;
        hex(random_bytes::<12>())
    }

    /// Records a job and queues it; once this returns, the job survives a restart. Its place is given back when it counts as
    /// a queued one.
    fn submit(&self, live: &Arc<LiveJob>, place: Slot) -> std::result::Result<(), SubmitError>;

    /// Cancels a job; returns whether there was one to cancel. Waits neither for the disk nor for another process.
    fn cancel(&self, id: &str) -> bool;

    /// [`Submitting::cancel`] that waits until it is recorded, if that is elsewhere.
    fn cancel_now(&self, id: &str) -> Result<bool> {
        Ok(self.cancel(id))
    }

    /// Gives waiting jobs of a client their places in this order.
    fn reorder(&self, client: &str, order: &[String]) -> Result<()>;
}

/// Records attempts at jobs. A method returns once the record is certain.
pub(crate) trait Attempting: Send + Sync {
    /// Marks a job as running and counts an attempt.
    fn start(&self, id: &str) -> Result<()>;

    /// Hears that a started job is handed to the generator. Doesn't wait.
    fn generating(&self, id: &str) {
        let _ = id;
    }

    /// Hears that the default model could not be loaded.
    fn load_failed(&self, reason: &str) {
        let _ = reason;
    }

    /// Returns a started job to the queue; the attempt does not count.
    fn undo_start(&self, id: &str) -> Result<()>;

    /// Hears of jobs that are not started here any more. Doesn't wait.
    fn abandon(&self, ids: Vec<String>) {
        let _ = ids;
    }

    /// Records the end of a job. Returns false if it is to be tried again elsewhere.
    fn finish(&self, end: &JobEnd) -> Result<bool>;

    /// Stores an image, in place of one with the same id.
    fn save_image(&self, image: &ImageRow) -> Result<()>;

    /// Deletes the images of a job, which another attempt makes again.
    fn delete_images_of(&self, job: &str) -> Result<()> {
        let _ = job;
        Ok(())
    }

    /// Tells watchers elsewhere how far a job is. Doesn't wait.
    fn progress(&self, live: &LiveJob) {
        let _ = live;
    }

    /// Claims further jobs that fit into a batch with this one, up to `room` images; they are queued here.
    fn claim_batch(&self, first: &LiveJob, room: u32) {
        let _ = (first, room);
    }

    /// Deletes what is beyond the limits, every now and then.
    fn clean_up_occasionally(&self, limits: GalleryLimits) -> Result<()> {
        let _ = limits;
        Ok(())
    }
}

/// Keeps what clients have besides jobs: images, plots, inputs, sessions. A method returns once the record is certain, and
/// once this process reads what it wrote.
pub(crate) trait Keeping: Send + Sync {
    /// Deletes an image and its file; returns whether it existed.
    fn delete_image(&self, id: &str) -> Result<bool>;

    /// Changes the marks of these images, all or none. Returns the first id that doesn't exist, if any.
    fn mark(&self, ids: &[String], marks: Marks) -> Result<Option<String>>;

    fn insert_plot(&self, plot: &PlotRow) -> Result<()>;

    fn insert_session(&self, session: &Session) -> Result<()>;

    fn delete_session(&self, session: &Session) -> Result<()>;

    /// Forgets the webhook of a job: it was called, or can't be.
    fn remove_webhook(&self, job: &str) -> Result<()>;

    /// Claims an input of this size for a client; see [`InputFiles::claim`](crate::jobs::store::InputFiles::claim).
    fn claim_input(&self, name: &str, client: &str, bytes: u64, quota: u64) -> Result<Claim>;

    /// Notes that a client uses an input that it claimed.
    fn touch_input(&self, name: &str, client: &str) -> Result<()>;
}

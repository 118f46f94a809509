//! Unfinished jobs of an earlier process: resumed, or failed if that is not possible.

use std::sync::Arc;

use crate::jobs::attempts::Attempts;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::job::{Job, JobEnd};
use crate::jobs::live::LiveJob;
use crate::jobs::store::StoreError;

/// A job during which the process died this often fails instead of being retried.
const MAX_ATTEMPTS: u32 = 2;

impl Attempts {
    /// Puts the jobs of an earlier process back into the queue, and fails those that can't be resumed.
    pub(crate) fn resume_unfinished(&self) -> Result<(), StoreError> {
        for job in self.store.unfinished()? {
            if let Some(error) = resume_error(&job) {
                tracing::warn!(job = job.id, code = error.code.name(), error.message, "job not resumed");
                self.store.finish(&JobEnd { notes: job.notes, ..JobEnd::unstarted(&job.id, error) })?;
                continue;
            }
            tracing::info!(job = job.id, "job resumed");
            self.store.requeue(&job.id)?;
            let (cost, run_alone) = (self.cost(&job.request), job.attempts > 0);
            self.enqueue(LiveJob::new(Arc::new(Job { cost, run_alone, ..job })));
        }
        self.store.clean_up(self.config.gallery)
    }
}

/// Why a job that an earlier process left unfinished can't be resumed.
fn resume_error(job: &Job) -> Option<JobError> {
    let interrupted = |message: &str| Some(JobError::new(ErrorCode::Interrupted, message));
    if let Some(reason) = &job.unreadable {
        return Some(JobError::new(
            ErrorCode::UnreadableJob,
            format!("the stored request can't be read: {reason}"),
        ));
    }
    if job.attached {
        interrupted("the server restarted while the client waited")
    } else if job.attempts >= MAX_ATTEMPTS {
        interrupted("the server died repeatedly while this job was running; it is not retried")
    } else {
        None
    }
}

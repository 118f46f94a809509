//! Unfinished jobs of an earlier process: resumed, or failed if that is not possible.

use crate::attempts::Attempts;
use crate::generator::JobError;
use crate::live::{Api, LiveJob};
use crate::store::{JobEnd, JobRow, JobState, StoreError, now};

/// A job during which the process died this often fails instead of being retried.
const MAX_ATTEMPTS: u32 = 2;

impl Attempts {
    /// Puts the jobs of an earlier process back into the queue, and fails those that can't be resumed.
    pub(crate) fn resume_unfinished(&self) -> Result<(), StoreError> {
        for job in self.store.unfinished()? {
            if let Some(error) = resume_error(&job) {
                tracing::warn!(job = job.id, error.code, error.message, "job not resumed");
                self.store.finish(&JobEnd {
                    id: job.id,
                    state: JobState::Failed,
                    error: Some((error.code.into(), error.message)),
                    notes: job.notes,
                    finished: now(),
                    retry: false,
                })?;
                continue;
            }
            tracing::info!(job = job.id, "job resumed");
            self.store.requeue(&job.id)?;
            let mut live = LiveJob::new(job.id, job.client, job.request, Api::Jobs, false);
            live.run_alone = job.attempts > 0;
            live.cost = self.cost(&live.request);
            live.priority = job.priority;
            self.enqueue(live);
        }
        self.store.clean_up(self.config.gallery)
    }
}

/// Why a job that an earlier process left unfinished can't be resumed.
fn resume_error(job: &JobRow) -> Option<JobError> {
    let interrupted = |message: &str| Some(JobError::server("interrupted", message));
    if let Some(reason) = &job.unreadable {
        return Some(JobError::server(
            "unreadable_job",
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

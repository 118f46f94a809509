//! Changes of a job's record: by compare-and-set, so that no other process's change is lost.

use super::bucket::WriteOutcome;
use super::error::{FleetError, Result};
use super::link::Link;
use crate::jobs::error::JobError;
use crate::jobs::job::{Job, JobState};
use crate::jobs::store::now;

/// Changes the record of a job; retries after a conflict. Returns the new revision if it was changed.
pub(super) async fn change_job(
    link: &Link,
    id: &str,
    change: impl Fn(&mut Job) -> bool,
) -> Result<Option<u64>> {
    let key = Job::record_key(id);
    loop {
        let Some(entry) = link.entry(&key).await?.filter(|entry| entry.is_present) else { return Ok(None) };
        let record = serde_json::from_slice::<Job>(&entry.value);
        let mut record = record.map_err(|error| FleetError(format!("the record of job {id}: {error}")))?;
        if !change(&mut record) {
            return Ok(None);
        }
        if let WriteOutcome::Revision(revision) = link.update(&key, &record, entry.revision).await? {
            return Ok(Some(revision));
        }
    }
}

/// Cancels a job: at once if it is queued; for a running one, the record tells its worker.
pub(super) async fn cancel(link: &Link, id: &str, at_preview: bool) {
    let cancelled = change_job(link, id, |job| {
        match job.state {
            JobState::Queued => {
                job.state = JobState::Cancelled;
                job.error = Some(JobError::cancelled());
                job.finished = Some(now());
            }
            JobState::Running if at_preview => job.fleet.stop_at_preview = true,
            JobState::Running => job.fleet.cancel = true,
            _ => return false,
        }
        true
    });
    if let Err(error) = cancelled.await {
        tracing::error!(job = id, %error, "could not cancel a job");
    }
}

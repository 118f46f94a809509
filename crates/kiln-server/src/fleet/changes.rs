//! Changes of a job's record: by compare-and-set, so that no other process's change is lost.

use super::bucket::WriteOutcome;
use super::error::Result;
use super::link::Link;
use crate::jobs::error::JobError;
use crate::jobs::job::{Job, JobState};
use crate::jobs::store::now;

/// Changes the record of a job; retries after a conflict. Returns the new revision if it was changed.
pub(super) async fn change_job(
    link: &Link,
    id: &str,
    mut change: impl FnMut(&mut Job) -> bool,
) -> Result<Option<u64>> {
    while let Some((mut job, revision)) = read_job(link, id).await? {
        if !change(&mut job) {
            break;
        }
        if let WriteOutcome::Revision(revision) = link.update(&Job::record_key(id), &job, revision).await? {
            return Ok(Some(revision));
        }
    }
    Ok(None)
}

/// Reads the record of a job, and its revision; `None` if there is none, or if it can't be read.
pub(super) async fn read_job(link: &Link, id: &str) -> Result<Option<(Job, u64)>> {
    let Some(entry) = link.entry(&Job::record_key(id)).await?.filter(|entry| entry.is_present) else {
        return Ok(None);
    };
    let job = serde_json::from_slice(&entry.value);
    let job =
        job.inspect_err(|error| tracing::warn!(job = id, %error, "ignoring a record that can't be read"));
    Ok(job.ok().map(|job| (job, entry.revision)))
}

/// Cancels a job: at once if it is queued; for a running one, the record tells its worker. Returns the revision of its record,
/// if it had not ended.
pub(super) async fn cancel(link: &Link, id: &str, at_preview: bool) -> Result<Option<u64>> {
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
    cancelled.await.inspect_err(|error| tracing::error!(job = id, %error, "could not cancel a job"))
}

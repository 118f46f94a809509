//! Jobs of workers that are gone, and jobs that are given up.

use super::bucket::WriteOutcome;
use super::error::Result;
use super::link::Link;
use super::replica::{KnownJob, Replica};
use super::rules;
use crate::jobs::job::Job;
use crate::jobs::store::now;

/// Takes a job from a worker that is gone, unless its record has changed; blocks.
pub(super) fn recover(link: &Link, replica: &Replica, job: KnownJob) -> Result<()> {
    let mut changed = Job::clone(&job.record);
    let is_alive = |worker: &str| replica.is_alive(worker);
    let given_up = rules::recover(&mut changed, is_alive, link.config.give_up, now());
    tracing::warn!(
        job = changed.id,
        worker = job.record.fleet.worker,
        "taking a job from a worker that is gone"
    );
    let written = link.wait(link.update(&Job::record_key(&changed.id), &changed, job.revision))?;
    if given_up && written != WriteOutcome::Conflict {
        bury(link, &changed);
    }
    Ok(())
}

/// Writes a dead letter for a job that is given up. Its record says so in any case.
pub(super) fn bury(link: &Link, job: &Job) {
    tracing::error!(job = job.id, error = ?job.error, "giving a job up: see `kiln queue dead`");
    if let Err(error) = link.wait(link.publish_dead(job)) {
        tracing::error!(job = job.id, %error, "can't write a dead letter");
    }
}

//! The jobs that a worker holds: their tickets are kept alive until the jobs have ended or were given back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::message::AckKind;
use kiln_base::lock;

use super::changes::change_job;
use super::error::Result;
use super::recover::bury;
use super::replica::KnownJob;
use super::rules::{self, Finish};
use super::tickets::{HeldTicket, Release, Tickets};
use crate::jobs::job::{Job, JobEnd, JobState};
use crate::jobs::store::now;

/// The ticket of a job that this worker can't run for reasons of its own is left to others for so long.
const ASIDE_DELAY: Duration = Duration::from_secs(1);

impl Tickets {
    /// Notes that a job is being generated. A suspected one waits until that is recorded.
    pub(super) fn set_began(&self, id: &str, is_planning: bool) {
        let ticket = match lock(&self.held).get_mut(id) {
            Some(held) if !held.began && (!is_planning || held.suspected) => {
                held.began = true;
                held.ticket
            }
            _ => return,
        };
        let (link, id) = (Arc::clone(&self.link), id.to_owned());
        let recording = async move {
            let own = link.id.clone();
            let changed = change_job(&link, &id, |job| {
                let changes = rules::is_claimed_by(job, &own, ticket) && !job.fleet.began;
                job.fleet.began = true;
                changes
            });
            if let Err(error) = changed.await {
                tracing::warn!(job = id, %error, "can't record that a job is being generated");
            }
        };
        if is_planning {
            self.link.wait(recording);
        } else {
            self.link.handle().spawn(recording);
        }
    }

    /// Changes the record of a job that this worker holds for the last time, and forgets it. Returns its ticket, which is
    /// to be released, and whether the record was changed: not if the job is another worker's by now. `None` if it is not
    /// held.
    fn leave(&self, id: &str, mut change: impl FnMut(&mut Job)) -> Result<Option<(HeldTicket, bool)>> {
        let Some(left) = lock(&self.held).get_mut(id).map(|held| {
            held.leaving = true;
            held.clone()
        }) else {
            return Ok(None);
        };
        let own = |job: &mut Job| {
            let is_own = rules::is_claimed_by(job, &self.link.id, left.ticket);
            if is_own {
                change(job);
            }
            is_own
        };
        let changed = self.link.wait(change_job(&self.link, id, own))?.is_some();
        // Its ticket may have been delivered again, and another acknowledgement be due.
        let mut held = lock(&self.held);
        let is_it = held.get(id).is_some_and(|known| known.ticket == left.ticket);
        let last = if is_it { held.remove(id) } else { None };
        Ok(Some((last.unwrap_or(left), changed)))
    }

    /// Records the end of a job, or returns it to the queue for another try, and releases its ticket. Returns whether
    /// it has ended.
    pub(super) fn finish(&self, end: &JobEnd) -> Result<bool> {
        let (mut outcome, mut given_up) = (Finish::Ended, None);
        let left = self.leave(&end.id, |job| {
            outcome = rules::finish(job, end, &self.link.id, self.link.config.give_up);
            given_up = (outcome == Finish::GivenUp).then(|| job.clone());
        })?;
        let ended = matches!(outcome, Finish::Ended | Finish::GivenUp);
        let Some((held, changed)) = left else { return Ok(ended) };
        if let Some(job) = given_up.filter(|_| changed) {
            bury(&self.link, &job);
        }
        let release = match outcome {
            // It ended and only the answer was lost, or another worker has it: the redelivered ticket settles which.
            _ if !changed => Release::Leave,
            Finish::Ended | Finish::GivenUp => Release::Ack,
            Finish::SetAside => Release::Return(ASIDE_DELAY),
            Finish::Returned => Release::Return(Duration::ZERO),
        };
        self.release(&held.acker, release);
        Ok(ended)
    }

    /// Returns a job to the queue as if it had not been started.
    pub(super) fn give_back(&self, id: &str) -> Result<()> {
        let Some((held, changed)) = self.leave(id, |job| rules::give_back(job, now()))? else {
            return Ok(());
        };
        self.release(&held.acker, if changed { Release::Return(Duration::ZERO) } else { Release::Leave });
        Ok(())
    }

    /// Returns jobs to the queue that name this worker although it does not have them: the answer to its claim was lost, and
    /// so was the ticket whose redelivery would have shown that. `unheld` holds the records of such jobs by key and revision,
    /// and since when.
    pub(super) fn return_unheld(&self, unheld: &mut HashMap<(String, u64), Instant>) -> Result<()> {
        let jobs: Vec<KnownJob> = self.replica.state().jobs.values().cloned().collect();
        let is_unheld = |job: &&KnownJob| {
            let is_own = job.record.fleet.worker.as_deref() == Some(self.link.id.as_str());
            job.record.state == JobState::Running && is_own && !lock(&self.held).contains_key(&job.record.id)
        };
        let mut since = HashMap::new();
        for job in jobs.iter().filter(is_unheld) {
            let key = (Job::record_key(&job.record.id), job.revision);
            let first = unheld.get(&key).copied().unwrap_or_else(Instant::now);
            since.insert(key, first);
            if first.elapsed() > self.link.config.ack_wait {
                let mut returned = Job::clone(&job.record);
                rules::give_back(&mut returned, now());
                tracing::warn!(
                    job = returned.id,
                    "returning a job that was claimed without this worker's knowledge"
                );
                self.update(&returned, job.revision)?;
            }
        }
        *unheld = since;
        Ok(())
    }

    /// Tells the stream that a job, or every held one, is in progress.
    pub(super) fn in_progress(&self, job: Option<&str>) {
        let held: Vec<HeldTicket> = match job {
            Some(id) => lock(&self.held).get(id).cloned().into_iter().collect(),
            None => lock(&self.held).values().cloned().collect(),
        };
        for held in held {
            self.link.handle().spawn(async move {
                let _ = held.acker.ack_with(AckKind::Progress).await;
            });
        }
    }
}

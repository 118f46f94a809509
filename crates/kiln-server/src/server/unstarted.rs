//! Jobs that end before they start: cancelled, given up by their client, or left for the next start.

use std::sync::Arc;
use std::time::Duration;

use kiln_engine::FileRef;

use crate::Server;
use crate::generator::{ErrorKind, JobError, name};
use crate::live::LiveJob;
use crate::store::{JobEnd, JobState, now};

impl Server {
    /// Drops a job that was not started when the server stops; it stays queued in the database.
    pub(crate) fn abandon_unstarted(&self, live: &LiveJob) {
        self.remove_job(&live.id);
        live.change(|s| s.error = Some(stopping_error()));
    }

    /// Drops the decoded input images of a job, except those that an unplanned job needs.
    pub(crate) fn release_inputs(&self, live: &LiveJob) {
        live.set_planned();
        let unneeded: Vec<&FileRef> = {
            let queue = self.queue();
            let needed = |image: &FileRef| {
                let mut others = queue.live.values().filter(|other| !other.is_planned());
                others.any(|other| other.request.images().any(|other| other == image))
            };
            live.request.images().filter(|image| !needed(image)).collect()
        };
        unneeded.iter().for_each(|image| self.decoded.remove(name(&image.path)));
    }

    /// Cancels a job; returns whether there was one to cancel. Doesn't wait for the disk.
    pub(crate) fn cancel(&self, id: &str) -> bool {
        let mut queue = self.queue();
        let Some(live) = queue.live.get(id).cloned() else { return false };
        live.cancel();
        if self.ledger.is_gateway() {
            drop(queue);
            self.ledger.cancel(id, false);
        } else if queue.waiting.remove(id) {
            drop(queue);
            self.end_unstarted(&live, JobError::cancelled());
        } else {
            drop(queue);
            self.wake.notify_all();
        }
        true
    }

    /// [`Server::cancel`] that waits until it is recorded, if that is elsewhere.
    pub(crate) fn cancel_now(&self, id: &str) -> bool {
        if !self.ledger.is_gateway() {
            return self.cancel(id);
        }
        let Some(live) = self.live(id) else { return false };
        live.cancel();
        self.ledger
            .cancel_now(id)
            .inspect_err(|error| tracing::error!(job = id, %error, "not cancelled"))
            .is_ok()
    }

    /// Ends a job that was never started.
    pub(super) fn end_unstarted(&self, live: &LiveJob, error: JobError) {
        self.release_inputs(live);
        let cancelled = error.kind == ErrorKind::Cancelled;
        let state = if cancelled { JobState::Cancelled } else { JobState::Failed };
        let end = JobEnd {
            id: live.id.clone(),
            state,
            error: Some((error.code.into(), error.message.clone())),
            notes: Vec::new(),
            finished: now(),
            retry: false,
        };
        // Before it leaves the queue: then it is always found, here or there.
        self.record_end_soon(end, Duration::ZERO);
        self.remove_job(&live.id);
        self.metrics.job(state, None, Duration::ZERO, live.cost);
        tracing::info!(job = live.id, client = live.client, state = state.name(), "job ended in the queue");
        live.change(|s| (s.state, s.error) = (state, Some(error)));
    }
}

pub(crate) fn stopping_error() -> JobError {
    JobError::server("shutting_down", "the server is stopping")
}

/// A job that a client waits for; dropping this cancels it.
pub(crate) struct AttachedJob {
    server: Server,
    pub(crate) live: Arc<LiveJob>,
}

impl AttachedJob {
    pub(crate) fn new(server: &Server, live: Arc<LiveJob>) -> AttachedJob {
        AttachedJob { server: server.clone(), live }
    }
}

impl Drop for AttachedJob {
    fn drop(&mut self) {
        if !self.live.state().is_final() {
            tracing::info!(job = self.live.id, "client disconnected, cancelling its job");
            self.server.cancel(&self.live.id);
        }
    }
}

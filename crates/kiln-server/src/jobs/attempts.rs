//! Attempts at jobs: what a process has that generates, alone or as a worker of a fleet. Records how jobs end.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::jobs::error::JobError;
use crate::jobs::job::JobEnd;
use crate::jobs::live::LiveJob;
use crate::jobs::roles::{Attempting, Shutdown};
use crate::jobs::{Jobs, stopping_error};

/// How long to wait before another try to record an end.
const RETRY: Duration = Duration::from_millis(500);

/// The jobs, and where attempts at them are recorded. Clones share the same state.
#[derive(Clone)]
pub(crate) struct Attempts(Arc<AttemptsState>);

struct AttemptsState {
    jobs: Jobs,
    ledger: Box<dyn Attempting>,
}

/// A handle that doesn't keep the state alive.
#[derive(Clone)]
pub(crate) struct WeakAttempts(Weak<AttemptsState>);

impl WeakAttempts {
    pub(crate) fn upgrade(&self) -> Option<Attempts> {
        self.0.upgrade().map(Attempts)
    }
}

impl std::ops::Deref for Attempts {
    type Target = Jobs;

    fn deref(&self) -> &Jobs {
        &self.0.jobs
    }
}

impl Attempts {
    pub(crate) fn new(jobs: Jobs, ledger: Box<dyn Attempting>) -> Attempts {
        Attempts(Arc::new(AttemptsState { jobs, ledger }))
    }

    pub(crate) fn downgrade(&self) -> WeakAttempts {
        WeakAttempts(Arc::downgrade(&self.0))
    }

    pub(crate) fn jobs(&self) -> &Jobs {
        &self.0.jobs
    }

    pub(crate) fn ledger(&self) -> &dyn Attempting {
        &*self.0.ledger
    }

    /// Records the end of a job; if that fails, later.
    pub(crate) fn record_end(&self, end: JobEnd) {
        match self.ledger().finish(&end) {
            Ok(true) => self.recorded_end(&end.id),
            Ok(false) => {}
            Err(error) => {
                tracing::error!(job = end.id, %error, "failed to record the end of a job; trying again");
                self.record_end_soon(end, RETRY);
            }
        }
    }

    /// Records the end of a job on another thread, after `delay`. The job has ended for clients at once.
    pub(crate) fn record_end_soon(&self, end: JobEnd, delay: Duration) {
        if !self.unrecorded.insert(end) {
            return;
        }
        let attempts = self.downgrade();
        let thread = std::thread::Builder::new().name("recording".into());
        if thread.spawn(move || keep_recording(&attempts, delay)).is_err() {
            self.unrecorded.not_recording();
        }
    }

    /// Tries to record the ends that are not in the database; returns whether that worked.
    fn try_record_ends(&self) -> bool {
        for end in self.unrecorded.all().into_values() {
            let Ok(ended) = self.ledger().finish(&end) else { return false };
            self.unrecorded.remove(&end.id);
            if ended {
                self.recorded_end(&end.id);
            }
        }
        true
    }

    /// Ends a job that was never started.
    pub(crate) fn end_unstarted(&self, live: &LiveJob, error: JobError) {
        self.release_inputs(live);
        let end = JobEnd::unstarted(&live.id, error.clone());
        let state = end.state;
        // Before it leaves the queue: then it is always found, here or there.
        self.record_end_soon(end, Duration::ZERO);
        self.remove_job(live);
        self.metrics.job(state, None, Duration::ZERO, live.cost);
        tracing::info!(job = live.id, client = live.client, state = state.name(), "job ended in the queue");
        live.change(|s| (s.state, s.error) = (state, Some(error)));
    }
}

impl Shutdown for Attempts {
    /// Queued jobs stay in the database; those whose clients wait on a connection fail.
    fn close(&self) {
        let Some(waiting) = self.stop_taking() else { return };
        let (attached, others): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|live| live.attached);
        attached.iter().for_each(|live| self.end_unstarted(live, stopping_error()));
        others.iter().for_each(|live| live.change(|s| s.error = Some(stopping_error())));
        self.ledger().abandon(others.iter().map(|live| live.id.clone()).collect());
        self.closing.send_replace(true);
    }

    fn record_ends(&self) {
        self.try_record_ends();
    }
}

/// Tries until every end is recorded, or the server is gone.
fn keep_recording(attempts: &WeakAttempts, mut delay: Duration) {
    loop {
        std::thread::sleep(delay);
        delay = RETRY;
        let Some(attempts) = attempts.upgrade() else { return };
        if attempts.try_record_ends() && attempts.unrecorded.stop_recording() {
            return;
        }
    }
}

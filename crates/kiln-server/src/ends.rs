//! The ends of jobs. One that can't be recorded, because the disk is full or the database locked, is shown all the same
//! and recorded as soon as possible.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use kiln_base::lock;

use crate::Server;
use crate::server::WeakServer;
use crate::store::{JobEnd, JobRow, StoreError};

/// How long to wait before another try.
const RETRY: Duration = Duration::from_millis(500);

/// Ends that are not in the database yet, by job.
#[derive(Default)]
pub(crate) struct UnrecordedEnds(Mutex<UnrecordedState>);

#[derive(Default)]
struct UnrecordedState {
    ends: HashMap<String, JobEnd>,
    /// Whether a thread tries to record them.
    recording: bool,
}

impl Server {
    /// Records the end of a job; if that fails, later.
    pub(crate) fn record_end(&self, end: JobEnd) {
        match self.ledger.finish(&end) {
            Ok(true) => self.webhooks.call(self, &end.id),
            Ok(false) => {}
            Err(error) => {
                tracing::error!(job = end.id, %error, "failed to record the end of a job; trying again");
                self.record_end_soon(end, RETRY);
            }
        }
    }

    /// Records the end of a job on another thread, after `delay`. The job has ended for clients at once.
    pub(crate) fn record_end_soon(&self, end: JobEnd, delay: Duration) {
        {
            let mut state = lock(&self.unrecorded.0);
            state.ends.insert(end.id.clone(), end);
            if std::mem::replace(&mut state.recording, true) {
                return;
            }
        }
        let server = self.downgrade();
        let thread = std::thread::Builder::new().name("recording".into());
        if thread.spawn(move || keep_recording(&server, delay)).is_err() {
            lock(&self.unrecorded.0).recording = false;
        }
    }

    /// Tries to record the ends that are not in the database; returns whether none is left.
    pub(crate) fn record_ends(&self) -> bool {
        let ends: Vec<JobEnd> = lock(&self.unrecorded.0).ends.values().cloned().collect();
        for end in ends {
            let Ok(ended) = self.ledger.finish(&end) else { return false };
            lock(&self.unrecorded.0).ends.remove(&end.id);
            if ended {
                self.webhooks.call(self, &end.id);
            }
        }
        true
    }

    /// The job with this id, as the database will have it.
    pub(crate) fn stored_job(&self, id: &str) -> Result<Option<JobRow>, StoreError> {
        // Before the row is read: an end that is recorded in between is in the row.
        let end = lock(&self.unrecorded.0).ends.get(id).cloned();
        Ok(self.store.job(id)?.map(|row| with_end(row, end)))
    }

    /// The latest jobs of one client or of all, newest first, as the database will have them.
    pub(crate) fn stored_jobs(&self, limit: u32, client: Option<&str>) -> Result<Vec<JobRow>, StoreError> {
        let mut ends = lock(&self.unrecorded.0).ends.clone();
        let rows = self.store.jobs(limit, client)?.into_iter();
        Ok(rows
            .map(|row| {
                let end = ends.remove(&row.id);
                with_end(row, end)
            })
            .collect())
    }
}

/// The row of a job with an end that is not in the database yet.
fn with_end(mut row: JobRow, end: Option<JobEnd>) -> JobRow {
    if let Some(end) = end {
        (row.state, row.error, row.notes) = (end.state, end.error, end.notes);
        row.finished = Some(end.finished);
    }
    row
}

/// Tries until every end is recorded, or the server is gone.
fn keep_recording(server: &WeakServer, mut delay: Duration) {
    loop {
        std::thread::sleep(delay);
        delay = RETRY;
        let Some(server) = server.upgrade() else { return };
        let recorded = server.record_ends();
        let mut state = lock(&server.unrecorded.0);
        if recorded && state.ends.is_empty() {
            state.recording = false;
            return;
        }
    }
}

//! Ends of jobs that can't be recorded yet, because the disk is full or the database locked: they are shown all the same
//! and recorded as soon as possible.

use std::collections::HashMap;
use std::sync::Mutex;

use kiln_base::lock;

use crate::jobs::job::JobEnd;

/// Ends that are not in the database yet, by job.
#[derive(Default)]
pub(crate) struct UnrecordedEnds(Mutex<UnrecordedState>);

#[derive(Default)]
struct UnrecordedState {
    ends: HashMap<String, JobEnd>,
    /// Whether a thread tries to record them.
    recording: bool,
}

impl UnrecordedEnds {
    pub(crate) fn get(&self, id: &str) -> Option<JobEnd> {
        lock(&self.0).ends.get(id).cloned()
    }

    pub(crate) fn all(&self) -> HashMap<String, JobEnd> {
        lock(&self.0).ends.clone()
    }

    /// Adds an end; returns whether a thread must be started that records it.
    pub(crate) fn insert(&self, end: JobEnd) -> bool {
        let mut state = lock(&self.0);
        state.ends.insert(end.id.clone(), end);
        !std::mem::replace(&mut state.recording, true)
    }

    pub(crate) fn remove(&self, id: &str) {
        lock(&self.0).ends.remove(id);
    }

    /// The thread that records ends could not be started.
    pub(crate) fn not_recording(&self) {
        lock(&self.0).recording = false;
    }

    /// Whether the thread that records ends may stop: none is left.
    pub(crate) fn stop_recording(&self) -> bool {
        let mut state = lock(&self.0);
        state.recording = !state.ends.is_empty();
        !state.recording
    }
}

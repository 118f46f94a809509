//! The queue: waiting jobs, planned and running ones.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use crate::jobs::fair_queue::FairQueue;
use crate::jobs::job::JobState;
use crate::jobs::live::LiveJob;

#[derive(Default)]
pub(crate) struct Queue {
    /// Jobs that are not planned yet.
    pub(crate) waiting: FairQueue,
    /// Every job that has not ended, by id.
    pub(crate) live: LiveJobs,
    /// The clients of jobs that are being inserted into the database; they count towards the limits.
    pub(crate) inserting: Vec<String>,
    /// Planned and running jobs, oldest first. Until the generator gets them their state is `Queued`.
    pub(crate) active: Vec<Arc<LiveJob>>,
    pub(crate) stopping: bool,
}

impl Queue {
    /// Jobs that are planned or being planned and wait for the generator.
    pub(crate) fn planned(&self) -> impl Iterator<Item = &Arc<LiveJob>> {
        self.active.iter().filter(|live| live.state() == JobState::Queued)
    }

    pub(crate) fn queued_count(&self) -> usize {
        self.waiting.len() + self.inserting.len() + self.planned().count()
    }

    pub(crate) fn push(&mut self, live: Arc<LiveJob>) {
        self.waiting.push(Arc::clone(&live.job));
        self.live.insert(live);
    }

    /// Removes this job; another one with its id stays.
    pub(crate) fn remove(&mut self, live: &LiveJob) {
        let is_it = |known: &Arc<LiveJob>| std::ptr::eq(&**known, live);
        if self.live.get(&live.id).is_some_and(is_it) {
            self.live.remove(&live.id);
        }
        self.active.retain(|active| !is_it(active));
    }

    /// Takes waiting jobs with this batch key, up to `room` images in total.
    pub(crate) fn take_batchable(&mut self, batch_key: &str, mut room: u32) -> Vec<Arc<LiveJob>> {
        let mut jobs = Vec::new();
        while room > 0 {
            let Some(job) = self.waiting.take_batchable(batch_key, room) else { break };
            room -= job.images().min(room);
            jobs.extend(self.live.get(&job.id).cloned());
        }
        self.active.extend(jobs.iter().cloned());
        jobs
    }
}

/// Jobs by id, and how many each client has.
#[derive(Default)]
pub(crate) struct LiveJobs {
    jobs: HashMap<String, Arc<LiveJob>>,
    clients: HashMap<String, usize>,
}

impl Deref for LiveJobs {
    type Target = HashMap<String, Arc<LiveJob>>;

    fn deref(&self) -> &Self::Target {
        &self.jobs
    }
}

impl LiveJobs {
    /// The number of jobs of a client.
    pub(crate) fn of_client(&self, client: &str) -> usize {
        self.clients.get(client).copied().unwrap_or(0)
    }

    /// Adds a job, or replaces the one with its id.
    pub(crate) fn insert(&mut self, live: Arc<LiveJob>) {
        self.remove(&live.id);
        *self.clients.entry(live.client.clone()).or_default() += 1;
        self.jobs.insert(live.id.clone(), live);
    }

    /// Adds a job, unless there is one with its id: that is returned.
    pub(crate) fn insert_new(&mut self, live: &Arc<LiveJob>) -> Option<Arc<LiveJob>> {
        let earlier = self.jobs.get(&live.id).cloned();
        if earlier.is_none() {
            self.insert(Arc::clone(live));
        }
        earlier
    }

    pub(crate) fn remove(&mut self, id: &str) {
        let Some(live) = self.jobs.remove(id) else { return };
        if let Some(count) = self.clients.get_mut(&live.client) {
            *count -= 1;
            if *count == 0 {
                self.clients.remove(&live.client);
            }
        }
    }
}

/// What happened while a planned group waited for the generator.
pub(crate) enum GroupEvent {
    /// A generator is idle: generate the group.
    GeneratorIdle,
    /// These jobs can be generated in the same batch.
    Join(Vec<Arc<LiveJob>>),
    /// A job of the group was cancelled.
    Cancelled,
    /// The server is stopping.
    Stopping,
}

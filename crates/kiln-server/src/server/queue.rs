//! The queue: waiting jobs, planned and running ones, and the threads that wait for them.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, MutexGuard};
#[cfg(feature = "fleet")]
use std::{sync::PoisonError, time::Duration};

use kiln_base::{lock, wait};

use crate::Server;
use crate::fair_queue::{FairQueue, QueuedJob};
use crate::live::LiveJob;
use crate::store::{JobState, StoreError};

#[derive(Default)]
pub(crate) struct Queue {
    /// Jobs that are not planned yet.
    pub(crate) waiting: FairQueue,
    /// Every job that has not ended, by id.
    pub(crate) live: LiveJobs,
    /// The clients of jobs that are being inserted into the database; they count towards the limits.
    pub(super) inserting: Vec<String>,
    /// Planned and running jobs, oldest first. Until the generator gets them their state is `Queued`.
    pub(crate) active: Vec<Arc<LiveJob>>,
    pub(super) stopping: bool,
}

impl Queue {
    /// Jobs that are planned or being planned and wait for the generator.
    pub(super) fn planned(&self) -> impl Iterator<Item = &Arc<LiveJob>> {
        self.active.iter().filter(|live| live.state() == JobState::Queued)
    }

    pub(super) fn queued_count(&self) -> usize {
        self.waiting.len() + self.inserting.len() + self.planned().count()
    }

    pub(super) fn push(&mut self, job: QueuedJob, live: Arc<LiveJob>) {
        self.waiting.push(job);
        self.live.insert(live);
    }

    /// Takes waiting jobs with this batch key, up to `room` images in total.
    fn take_batchable(&mut self, batch_key: &str, mut room: u32) -> Vec<Arc<LiveJob>> {
        let mut jobs = Vec::new();
        while room > 0 {
            let Some(job) = self.waiting.take_batchable(batch_key, room) else { break };
            room -= job.images.min(room);
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
    pub(super) fn of_client(&self, client: &str) -> usize {
        self.clients.get(client).copied().unwrap_or(0)
    }

    /// Adds a job, or replaces the one with its id.
    pub(crate) fn insert(&mut self, live: Arc<LiveJob>) {
        self.remove(&live.id);
        *self.clients.entry(live.client.clone()).or_default() += 1;
        self.jobs.insert(live.id.clone(), live);
    }

    /// Adds a job, unless there is one with its id: that is returned.
    pub(super) fn insert_new(&mut self, live: &Arc<LiveJob>) -> Option<Arc<LiveJob>> {
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

impl Server {
    /// Puts a stored job into the queue.
    pub(crate) fn enqueue(&self, live: LiveJob) {
        let queued = self.queued_job(&live);
        self.queue().push(queued, Arc::new(live));
    }

    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Waits until `find` returns something.
    fn wait<T>(&self, mut find: impl FnMut(&mut Queue) -> Option<T>) -> T {
        let mut queue = self.queue();
        loop {
            if let Some(found) = find(&mut queue) {
                return found;
            }
            queue = wait(&self.wake, queue);
        }
    }

    /// Makes all waiting threads check their condition again.
    pub(crate) fn wake_all(&self) {
        // While this lock is held, no thread is between checking its condition and waiting.
        drop(self.queue());
        self.wake.notify_all();
    }

    /// Waits for the next job; `None` when the server stops.
    pub(crate) fn next_job(&self) -> Option<Arc<LiveJob>> {
        self.wait(|queue| {
            if queue.stopping {
                return Some(None);
            }
            let live = queue.waiting.take().and_then(|job| queue.live.get(&job.id).cloned())?;
            queue.active.push(Arc::clone(&live));
            Some(Some(live))
        })
    }

    /// Waits until no job is queued here and `wanted` agrees, at most for `timeout`; it hears whether a generator is free.
    /// Returns whether it did, and `None` when the server stops.
    #[cfg(feature = "fleet")]
    pub(crate) fn wait_for_room(
        &self,
        timeout: Duration,
        mut wanted: impl FnMut(bool) -> bool,
    ) -> Option<bool> {
        let mut has_room =
            |queue: &mut Queue| queue.queued_count() == 0 && wanted(self.idle_generators.load(SeqCst) > 0);
        let wait =
            self.wake.wait_timeout_while(self.queue(), timeout, |queue| !queue.stopping && !has_room(queue));
        let (queue, wait) = wait.unwrap_or_else(PoisonError::into_inner);
        (!queue.stopping).then_some(!wait.timed_out())
    }

    /// Waits for the next event of a planned group: jobs with up to `room` images that can join it, a cancelled member,
    /// or an idle generator. A group never waits for others to join.
    pub(crate) fn wait_for_group_event(
        &self,
        first: &LiveJob,
        room: u32,
        idle_generators: &AtomicUsize,
        members: &[&LiveJob],
    ) -> GroupEvent {
        let batch_key = self.batch_key(first);
        self.wait(|queue| {
            if queue.stopping {
                return Some(GroupEvent::Stopping);
            }
            if members.iter().any(|live| live.is_cancelled()) {
                return Some(GroupEvent::Cancelled);
            }
            let joining = batch_key.as_ref().map_or(Vec::new(), |key| queue.take_batchable(key, room));
            if !joining.is_empty() {
                return Some(GroupEvent::Join(joining));
            }
            let promised = idle_generators.fetch_update(SeqCst, SeqCst, |idle| idle.checked_sub(1));
            promised.is_ok().then_some(GroupEvent::GeneratorIdle)
        })
    }

    /// Waits until every other active job has ended or this one is cancelled; `false` when the server stops.
    pub(crate) fn wait_until_alone(&self, live: &LiveJob) -> bool {
        self.wait(|queue| {
            if queue.stopping {
                return Some(false);
            }
            let alone = queue.active.iter().all(|other| other.id == live.id);
            (alone || live.is_cancelled()).then_some(true)
        })
    }

    /// Waits until this job has ended or the server stops.
    pub(crate) fn wait_until_ended(&self, live: &LiveJob) {
        self.wait(|queue| {
            let ended = queue.active.iter().all(|active| active.id != live.id);
            (ended || queue.stopping).then_some(())
        });
    }

    /// Removes a job from the queue.
    pub(crate) fn remove_job(&self, id: &str) {
        {
            let mut queue = self.queue();
            queue.live.remove(id);
            queue.active.retain(|live| live.id != id);
        }
        self.wake.notify_all();
    }

    /// Forgets a job whose record was deleted.
    #[cfg(feature = "fleet")]
    pub(crate) fn remove_waiting(&self, id: &str) {
        self.queue().waiting.remove(id);
        self.remove_job(id);
    }

    /// A job that has not ended.
    pub(crate) fn live(&self, id: &str) -> Option<Arc<LiveJob>> {
        self.queue().live.get(id).cloned()
    }

    /// Every job that has not ended: planned and running jobs, then waiting ones in their order.
    pub(crate) fn unfinished(&self) -> Vec<Arc<LiveJob>> {
        let queue = self.queue();
        let waiting = queue.waiting.ids().filter_map(|id| queue.live.get(id));
        queue.active.iter().chain(waiting).cloned().collect()
    }

    /// Gives waiting jobs of a client their places in this order.
    pub(crate) fn reorder(&self, client: &str, order: &[String]) -> Result<(), StoreError> {
        let ids = if self.ledger.is_gateway() {
            // The places come back with the records.
            self.queue().waiting.clone().reorder(client, order)
        } else {
            self.queue().waiting.reorder(client, order)
        };
        self.ledger.set_order(&ids)
    }

    /// Planned and running jobs, oldest first.
    pub(crate) fn active(&self) -> Vec<Arc<LiveJob>> {
        self.queue().active.clone()
    }

    /// The number of jobs whose turn comes before this one's.
    pub(crate) fn position(&self, id: &str) -> Option<usize> {
        let queue = self.queue();
        match queue.waiting.position(id) {
            Some(before) => Some(before + queue.planned().count()),
            None => queue.planned().position(|live| live.id == id),
        }
    }

    /// The number of queued jobs.
    pub(crate) fn queued_count(&self) -> usize {
        self.queue().queued_count()
    }
}

//! Waiting for jobs, for room, and for what happens to a group of jobs.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use kiln_base::{lock, wait};

use super::Jobs;
use crate::jobs::live::LiveJob;
use crate::jobs::queue::{GroupEvent, Queue};

impl Jobs {
    /// Puts a stored job into the queue.
    pub(crate) fn enqueue(&self, live: LiveJob) {
        self.queue().push(Arc::new(live));
    }

    /// Puts an accepted job into the queue, unless no more are taken; returns whether it did.
    pub(crate) fn push(&self, live: &Arc<LiveJob>) -> bool {
        let mut queue = self.queue();
        if queue.stopping {
            return false;
        }
        queue.push(Arc::clone(live));
        drop(queue);
        self.wake.notify_all();
        true
    }

    /// Takes no more jobs. Returns those that wait; `None` if that was so already.
    pub(crate) fn stop_taking(&self) -> Option<Vec<Arc<LiveJob>>> {
        let waiting = {
            let mut queue = self.queue();
            if std::mem::replace(&mut queue.stopping, true) {
                return None;
            }
            let is_active = |live: &LiveJob| queue.active.iter().any(|active| active.id == live.id);
            queue.live.values().filter(|live| !is_active(live)).cloned().collect()
        };
        self.wake.notify_all();
        Some(waiting)
    }

    /// Whether no more jobs are taken.
    pub(crate) fn is_stopping(&self) -> bool {
        self.queue().stopping
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
        let batch_key = first.batch_key();
        self.wait(|queue| {
            if queue.stopping {
                return Some(GroupEvent::Stopping);
            }
            if members.iter().any(|live| live.is_cancelled()) {
                return Some(GroupEvent::Cancelled);
            }
            let joining = batch_key.map_or(Vec::new(), |key| queue.take_batchable(key, room));
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

    /// Removes a job from the queue. Another one with its id stays: on a gateway, that of an earlier request with its key.
    pub(crate) fn remove_job(&self, live: &LiveJob) {
        self.queue().remove(live);
        self.wake.notify_all();
    }

    /// Removes a job that was not accepted, unless it waits or runs for a record with its id.
    pub(crate) fn remove_unaccepted(&self, live: &LiveJob) {
        let mut queue = self.queue();
        let runs = queue.active.iter().any(|active| active.id == live.id);
        if !runs && queue.waiting.position(&live.id).is_none() {
            queue.remove(live);
        }
    }

    /// Forgets a job whose record was deleted.
    pub(crate) fn remove_waiting(&self, id: &str) {
        self.queue().waiting.remove(id);
        if let Some(live) = self.live(id) {
            self.remove_job(&live);
        }
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

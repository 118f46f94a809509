//! What this process knows of the fleet: unfinished jobs, tickets and nodes, as it follows the bucket of records.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_nats::jetstream::kv::Entry;
use futures_util::{FutureExt, StreamExt};
use kiln_base::lock;

use super::announce::NodeRecord;
use super::bucket::is_present;
use super::error::{FleetError, Result};
use super::link::Link;
use super::records::TicketId;
use crate::jobs::fair_queue::FairQueue;
use crate::jobs::job::{Job, JobState};
use crate::jobs::priority::Priority;

/// Pause before a watch that ended is started again.
const RESTART: Duration = Duration::from_millis(100);
/// Most records that are applied in one go.
const MAX_AT_ONCE: usize = 256;
/// Most tickets of ended jobs that are remembered.
const MAX_SPENT: usize = 1 << 20;

/// An unfinished job and the revision of its record.
#[derive(Clone, Debug)]
pub(super) struct KnownJob {
    pub(super) revision: u64,
    pub(super) record: Arc<Job>,
}

/// A process of the fleet.
#[derive(Clone, Debug)]
pub(super) struct KnownNode {
    pub(super) record: Arc<NodeRecord>,
    /// When it was last heard of.
    seen: Instant,
}

/// What a ticket is used for.
pub(super) enum TicketUse {
    Unused,
    Running(KnownJob),
    /// The job that ran with it has ended.
    Spent,
}

/// Who hears of the records that a replica follows.
pub(super) trait Follower: Send + Sync {
    /// A record, before the replica applies it.
    fn before(&self, entry: &Entry);
    /// The replica has applied it.
    fn after(&self) {}
    /// The bucket was deleted and created again: these unfinished jobs are lost.
    fn lost(&self, jobs: &[String]) {
        let _ = jobs;
    }
}

#[derive(Default)]
pub(super) struct State {
    revision: u64,
    pub(super) jobs: HashMap<String, KnownJob>,
    /// The running job of each ticket.
    tickets: HashMap<TicketId, String>,
    spent: BTreeSet<TicketId>,
    /// Queued jobs by model.
    queues: HashMap<String, FairQueue>,
    nodes: HashMap<String, KnownNode>,
    /// Since when this process has received its own announcements without a gap.
    fresh_since: Option<Instant>,
}

/// The state, and a signal for every change.
pub(super) struct Replica {
    state: Mutex<State>,
    changed: Condvar,
    /// A node that is silent for this long may be gone; after twice as long it is not listed any more.
    gone_after: Duration,
    /// The id of this process.
    own_id: String,
}

impl Replica {
    pub(super) fn new(link: &Link) -> Arc<Replica> {
        Arc::new(Replica {
            state: Mutex::default(),
            changed: Condvar::new(),
            gone_after: link.config.ack_wait / 2,
            own_id: link.id.clone(),
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Follows the bucket until the link is dropped.
    pub(super) async fn follow(
        self: Arc<Self>,
        link: std::sync::Weak<Link>,
        follower: impl Follower + 'static,
    ) {
        let follower = Arc::new(follower);
        let mut incarnation = None;
        while let Some(opened) = link.upgrade() {
            let Ok(info) = opened.state.stream.get_info().await.inspect_err(|error| {
                tracing::warn!(%error, "can't follow the queue's records");
            }) else {
                drop(opened);
                tokio::time::sleep(RESTART).await;
                continue;
            };
            if incarnation.replace(info.created).is_some_and(|known| known != info.created) {
                let jobs = self.forget();
                tracing::error!(
                    unfinished = jobs.len(),
                    "the queue's bucket was deleted: the records of all jobs and images are lost"
                );
                follower.lost(&jobs);
            }
            let known = self.state().revision;
            let watch = match known {
                0 => opened.state.watch_with_history(">").await,
                _ => opened.state.watch_all_from_revision(known + 1).await,
            };
            let silence = 2 * super::announce::interval(&opened) + Duration::from_secs(1);
            drop(opened);
            match watch {
                Ok(mut watch) => loop {
                    match tokio::time::timeout(silence, watch.next()).await {
                        Ok(Some(Ok(entry))) => {
                            let mut entries = vec![entry];
                            while entries.len() < MAX_AT_ONCE
                                && let Some(Some(Ok(entry))) = watch.next().now_or_never()
                            {
                                entries.push(entry);
                            }
                            // A follower writes to its database: not on the threads of the connection.
                            let (replica, follower) = (Arc::clone(&self), Arc::clone(&follower));
                            let applied = move || replica.apply_all(&entries, &*follower);
                            let _ = tokio::task::spawn_blocking(applied).await;
                        }
                        Ok(_) => break tracing::warn!("the watch on the queue's records ended"),
                        Err(_) => {
                            // This process announces itself more often than this: does the watch miss something?
                            let Some(opened) = link.upgrade() else { return };
                            let Ok(info) = opened.state.stream.get_info().await else { continue };
                            let missed = info.state.last_sequence > self.state().revision;
                            if missed || incarnation != Some(info.created) {
                                break tracing::warn!("the watch on the queue's records is silent");
                            }
                        }
                    }
                },
                Err(error) => tracing::warn!(%error, "can't follow the queue's records"),
            }
            tokio::time::sleep(RESTART).await;
        }
    }

    /// Forgets everything; returns the unfinished jobs.
    fn forget(&self) -> Vec<String> {
        let forgotten = std::mem::take(&mut *self.state());
        self.changed.notify_all();
        forgotten.jobs.into_keys().collect()
    }

    /// Applies records in their order; blocks.
    fn apply_all(&self, entries: &[Entry], follower: &impl Follower) {
        for entry in entries {
            if entry.revision > self.state().revision {
                follower.before(entry);
                self.apply(entry);
                follower.after();
            }
        }
    }

    fn apply(&self, entry: &Entry) {
        let mut state = self.state();
        if let Some(id) = entry.key.strip_prefix("job.") {
            let record = is_present(entry).then(|| serde_json::from_slice::<Job>(&entry.value));
            match record.transpose() {
                Ok(record) => state.apply_job(id, entry.revision, record.map(Arc::new), &self.own_id),
                Err(error) => tracing::warn!(%error, key = entry.key, "ignoring a record that can't be read"),
            }
        } else if let Some(id) = entry.key.strip_prefix("node.") {
            match serde_json::from_slice::<NodeRecord>(&entry.value) {
                Ok(record) if is_present(entry) => {
                    let (record, seen) = (Arc::new(record), Instant::now());
                    let before = state.nodes.insert(id.to_owned(), KnownNode { record, seen });
                    let gap = before.is_none_or(|before| before.seen.elapsed() > self.gone_after);
                    if id == self.own_id && gap {
                        state.fresh_since = Some(seen);
                    }
                }
                _ => drop(state.nodes.remove(id)),
            }
        }
        state.revision = entry.revision;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until this revision is known.
    pub(super) fn wait_for(&self, revision: u64) -> Result<()> {
        const LIMIT: Duration = Duration::from_secs(20);
        let wait = self.changed.wait_timeout_while(self.state(), LIMIT, |state| state.revision < revision);
        let (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if state.revision < revision {
            return Err(FleetError("timed out waiting for the queue's records".into()));
        }
        Ok(())
    }

    /// Waits until everything is known that was in the bucket when this was called. A write decides what that is: after
    /// a change of leaders, the servers' own word for the last revision may be an old one.
    pub(super) fn catch_up(&self, link: &Link) -> Result<()> {
        self.wait_for(link.wait(link.fence())?)
    }

    /// [`Replica::catch_up`] for those who only read.
    pub(super) fn catch_up_reading(&self, link: &Link) -> Result<()> {
        self.wait_for(link.wait(link.last_revision())?)
    }

    /// The nodes that are alive, oldest first.
    pub(super) fn nodes(&self) -> Vec<Arc<NodeRecord>> {
        let state = self.state();
        let alive = |node: &&KnownNode| node.seen.elapsed() < 2 * self.gone_after;
        let mut nodes: Vec<_> =
            state.nodes.values().filter(alive).map(|node| Arc::clone(&node.record)).collect();
        nodes.sort_by(|a, b| (a.started, &a.id).cmp(&(b.started, &b.id)));
        nodes
    }

    /// Whether a node may still be alive. Right after a gap in what this process receives, every node may be.
    pub(super) fn may_be_alive(&self, id: &str) -> bool {
        let state = self.state();
        let fresh = state.fresh_since.is_some_and(|since| since.elapsed() > self.gone_after);
        !fresh || state.nodes.get(id).is_some_and(|node| node.seen.elapsed() < self.gone_after)
    }

    /// Whether a node has announced itself lately.
    pub(super) fn is_alive(&self, id: &str) -> bool {
        self.state().nodes.get(id).is_some_and(|node| node.seen.elapsed() < self.gone_after)
    }
}

impl State {
    fn apply_job(&mut self, id: &str, revision: u64, record: Option<Arc<Job>>, own_id: &str) {
        let before = self.jobs.remove(id);
        if let Some(KnownJob { record: before, .. }) = &before {
            if let Some(ticket) = before.ticket_id()
                && self.tickets.get(&ticket).is_some_and(|job| job == id)
            {
                self.tickets.remove(&ticket);
            }
            if before.state == JobState::Queued
                && let Some(queue) = self.queues.get_mut(&before.fleet.model)
            {
                match &record {
                    Some(now) if now.state == JobState::Running => {
                        queue.take_id(id, now.fleet.worker.as_deref() == Some(own_id));
                    }
                    _ => drop(queue.remove(id)),
                }
            }
        }
        let Some(record) = record else { return };
        if let Some(ticket) = record.ticket_id() {
            if record.state.is_final() {
                self.spent.insert(ticket);
                if self.spent.len() > MAX_SPENT {
                    self.spent.pop_first();
                }
            } else {
                // The first job that names a ticket has it.
                self.tickets.entry(ticket).or_insert_with(|| id.to_owned());
            }
        }
        if record.state == JobState::Queued {
            self.queues.entry(record.fleet.model.clone()).or_default().insert(Arc::clone(&record));
        }
        if !record.state.is_final() {
            self.jobs.insert(id.to_owned(), KnownJob { revision, record });
        }
    }

    /// What a ticket is used for.
    pub(super) fn ticket_use(&self, ticket: TicketId) -> TicketUse {
        if self.spent.contains(&ticket) {
            return TicketUse::Spent;
        }
        let job = self.tickets.get(&ticket).and_then(|id| self.jobs.get(id));
        job.cloned().map_or(TicketUse::Unused, TicketUse::Running)
    }

    /// The job to run next for a model.
    pub(super) fn choose(&self, model: &str, may_run: impl Fn(&Job) -> bool) -> Option<KnownJob> {
        let may_run = |job: &Job| self.jobs.get(&job.id).is_some_and(|known| may_run(&known.record));
        let id = self.queues.get(model)?.choose(may_run)?;
        self.jobs.get(id).cloned()
    }

    /// A queued job that fits into a batch.
    pub(super) fn choose_batchable(&self, model: &str, key: &str, room: u32) -> Option<KnownJob> {
        let fits = |job: &Job| job.batch_key() == Some(key) && job.images() <= room;
        let id = self.queues.get(model)?.choose(fits)?;
        self.jobs.get(id).cloned()
    }

    /// Orders models by their queued jobs: the most urgent first.
    pub(super) fn urgency(&self, model: &str) -> Option<(Reverse<Priority>, u64)> {
        self.queues.get(model)?.urgency()
    }

    /// The number of queued jobs of a model.
    pub(super) fn queued(&self, model: &str) -> usize {
        self.queues.get(model).map_or(0, FairQueue::len)
    }
}

//! Tickets on a worker: pulling them, claiming jobs with them, and releasing them. The parent module has the rules.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::message::{AckKind, Acker, Message};
use futures_util::StreamExt;
use kiln_base::lock;

use super::gateway::change_job;
use super::link::{FleetError, Link, Result, WriteOutcome};
use super::records::{JobRecord, TicketId};
use super::replica::{KnownJob, Replica, TicketUse};
use super::rules::{self, Named, TicketAction, TicketView};
use super::withdrawn::Withdrawn;
use crate::generator::name;
use crate::store::{JobState, now};

/// How long a ticket is left to other workers if this one can't run what is queued.
const NAK_DELAY: Duration = Duration::from_millis(300);
/// The ticket of a job that this worker can't run for reasons of its own is left to others for so long.
const ASIDE_DELAY: Duration = Duration::from_secs(1);
/// Errors that say nothing about the job: the model can't be loaded here, nothing can be stored.
const OF_WORKER: [&str; 2] = ["model_failed", "storage"];
/// How long to wait for the ticket of a job that is known to be queued: its gateway publishes it after the record.
const TICKET_WAIT: Duration = Duration::from_millis(30);

/// A claimed job's ticket.
#[derive(Clone)]
pub(super) struct HeldTicket {
    pub(super) ticket: TicketId,
    acker: Arc<Acker>,
    /// Whether the record says that the job is being generated.
    began: bool,
    /// Whether the job may be what its workers died of.
    suspected: bool,
}

/// What this worker can run.
#[derive(Clone, Debug, Default)]
pub(super) struct Capabilities {
    /// Models, each with its hash.
    pub(super) models: Vec<(String, Option<String>)>,
    pub(super) loras: Vec<String>,
    pub(super) vaes: Vec<String>,
}

/// The tickets of a worker.
pub(super) struct Tickets {
    pub(super) link: Arc<Link>,
    pub(super) replica: Arc<Replica>,
    pub(super) held: Mutex<HashMap<String, HeldTicket>>,
    pub(super) capabilities: Mutex<Capabilities>,
    pub(super) withdrawn: Withdrawn,
    consumers: Mutex<HashMap<String, PullConsumer>>,
    /// Tickets that were still pending when the last one was pulled.
    pub(super) pending: AtomicU64,
    pub(super) redelivered: AtomicU64,
}

/// How to release a ticket.
enum Release {
    /// It is not needed any more.
    Ack,
    /// Another worker may use it after this time.
    Return(Duration),
    /// It is not a ticket.
    Refuse,
    /// It may belong to another worker by now.
    Leave,
}

/// What a ticket is to be used for.
#[derive(Clone, Copy)]
pub(super) enum Wanted<'a> {
    /// Any job of the model; `starts` says that a generator is free for it.
    Any { starts: bool },
    /// A job that fits into a batch with this key, of up to so many images.
    Batch(&'a str, u32),
}

impl Tickets {
    pub(super) fn new(link: &Arc<Link>, replica: &Arc<Replica>) -> Tickets {
        Tickets {
            link: Arc::clone(link),
            replica: Arc::clone(replica),
            held: Mutex::default(),
            capabilities: Mutex::default(),
            withdrawn: Withdrawn::default(),
            consumers: Mutex::default(),
            pending: AtomicU64::new(0),
            redelivered: AtomicU64::new(0),
        }
    }

    /// Whether this worker may run a job: it has what the job names, and the job did not fail here.
    pub(super) fn may_run(&self, job: &JobRecord) -> bool {
        let capabilities = lock(&self.capabilities);
        let Some((_, hash)) = capabilities.models.iter().find(|(name, _)| *name == job.model) else {
            return false;
        };
        let loras =
            job.request.loras.iter().all(|lora| capabilities.loras.iter().any(|own| own == name(&lora.path)));
        let vae =
            job.request.vae.iter().all(|vae| capabilities.vaes.iter().any(|own| own == name(&vae.path)));
        let own_hash = hash.clone();
        drop(capabilities);
        if !loras || !vae {
            return false;
        }
        let others = self.replica.nodes();
        let others = others.iter().filter(|node| node.worker && !node.draining && node.id != self.link.id);
        let mut others = others.filter_map(|node| {
            let model = node.models.iter().find(|model| model.info.name == job.model)?;
            Some((node, model))
        });
        // Other weights under the same name: the job is left to workers with those that the gateway meant.
        if job.hash.is_some() && job.hash != own_hash {
            return !others.any(|(_, model)| model.hash == job.hash);
        }
        // A worker that it failed on tries it again only if no other worker can.
        !job.failed_on.contains(&self.link.id) || !others.any(|(node, _)| !job.failed_on.contains(&node.id))
    }

    /// Whether a job of this model is queued, even if this worker can't run it.
    pub(super) fn has_queued(&self, model: &str) -> bool {
        self.replica.state().queued(model) > 0
    }

    /// Pulls a ticket of a model; waits a moment for one if a job is known to be queued.
    fn pull(&self, model: &str, is_queued: bool) -> Result<Option<Message>> {
        let (link, model) = (Arc::clone(&self.link), model.to_owned());
        let known = lock(&self.consumers).get(&model).cloned();
        let (consumer, message) = self.link.wait(async move {
            let consumer = match known {
                Some(consumer) => consumer,
                None => link.consumer(&model).await?,
            };
            let batch = if is_queued {
                consumer.batch().max_messages(1).expires(TICKET_WAIT).messages().await
            } else {
                consumer.fetch().max_messages(1).expires(Duration::from_secs(2)).messages().await
            };
            let mut batch = batch.map_err(|error| FleetError(error.to_string()))?;
            let message = batch.next().await.transpose().map_err(|error| FleetError(error.to_string()))?;
            Ok::<_, FleetError>(((model, consumer), message))
        })??;
        lock(&self.consumers).insert(consumer.0, consumer.1);
        Ok(message)
    }

    /// Forgets the consumers: they may be gone, or their stream, which is created again.
    pub(super) fn forget_consumers(&self) {
        lock(&self.consumers).clear();
        let link = Arc::clone(&self.link);
        let restored = self.link.wait(async move { link.restore_stream(&link.jobs).await });
        if let Err(error) = restored.and_then(|restored| restored) {
            tracing::warn!(%error, "can't pull tickets");
        }
    }

    /// Pulls a ticket of a model and claims a job with it. Returns the job, and whether there was a ticket.
    pub(super) fn claim(&self, model: &str, starts: bool) -> Result<(Option<Arc<JobRecord>>, bool)> {
        match self.pull(model, self.has_queued(model))? {
            Some(message) => Ok((self.use_ticket(model, message, Wanted::Any { starts }), true)),
            None => Ok((None, false)),
        }
    }

    /// Pulls tickets for jobs that fit into one batch, up to `room` images. After an error there may be fewer jobs; they are
    /// claimed and have to be run.
    pub(super) fn claim_batch(&self, model: &str, key: &str, mut room: u32) -> Vec<Arc<JobRecord>> {
        let mut jobs = Vec::new();
        while room > 0 && self.choose(model, Wanted::Batch(key, room)).is_some() {
            let pulled = self.pull(model, false).unwrap_or_else(|error| {
                tracing::warn!(%error, "can't pull tickets for a batch");
                None
            });
            let Some(message) = pulled else { break };
            let Some(job) = self.use_ticket(model, message, Wanted::Batch(key, room)) else { break };
            room = room.saturating_sub(crate::work::image_count(&job.request));
            jobs.push(job);
        }
        jobs
    }

    /// Claims a job with a ticket, or releases the ticket.
    fn use_ticket(&self, model: &str, message: Message, wanted: Wanted<'_>) -> Option<Arc<JobRecord>> {
        let info = message.info().ok()?;
        let stored = i64::try_from(info.published.unix_timestamp_nanos()).unwrap_or(0);
        let ticket = TicketId { stored, sequence: info.stream_sequence };
        if info.delivered > 1 {
            self.redelivered.fetch_add(1, SeqCst);
        }
        self.pending.store(info.pending, SeqCst);
        let (message, acker) = message.split();
        let acker = Arc::new(acker);
        let released = match serde_json::from_slice::<JobRecord>(&message.payload) {
            Ok(own) if own.model == model => self.try_claim(model, ticket, wanted, &acker),
            Ok(own) => {
                tracing::error!(job = own.id, "refusing a ticket of another model");
                Ok(Err(Release::Refuse))
            }
            Err(error) => {
                tracing::error!(?ticket, %error, "refusing a ticket that can't be read");
                Ok(Err(Release::Refuse))
            }
        };
        match released {
            Ok(Ok(job)) => Some(job),
            Ok(Err(release)) => {
                self.release(&acker, release);
                None
            }
            Err(error) => {
                // The ticket is redelivered after a while.
                tracing::warn!(?ticket, %error, "could not claim a job");
                None
            }
        }
    }

    fn release(&self, acker: &Arc<Acker>, release: Release) {
        let kind = match release {
            Release::Ack => AckKind::Ack,
            Release::Return(after) => AckKind::Nak(Some(after)),
            Release::Refuse => AckKind::Term,
            Release::Leave => return,
        };
        let acker = Arc::clone(acker);
        let sent = self.link.wait(async move {
            let sent = tokio::time::timeout(Duration::from_secs(2), acker.double_ack_with(kind));
            sent.await
                .map_err(|_| FleetError("timed out".into()))?
                .map_err(|error| FleetError(error.to_string()))
        });
        if let Err(error) = sent.and_then(|sent| sent) {
            tracing::debug!(%error, "can't acknowledge a ticket; it will be delivered again");
        }
    }

    fn try_claim(
        &self,
        model: &str,
        ticket: TicketId,
        wanted: Wanted<'_>,
        acker: &Arc<Acker>,
    ) -> Result<std::result::Result<Arc<JobRecord>, Release>> {
        let (pulled, mut caught_up) = (Instant::now(), false);
        while pulled.elapsed() < self.link.config.ack_wait / 2 {
            let (named, job) = self.named(ticket);
            let chosen = self.choose(model, wanted);
            if matches!(wanted, Wanted::Batch(..)) && chosen.is_none() {
                return Ok(Err(Release::Return(Duration::ZERO)));
            }
            let (runnable, queued) = (chosen.is_some(), self.has_queued(model));
            match rules::decide(TicketView { named, runnable, queued, caught_up }) {
                TicketAction::CatchUp => {
                    self.replica.catch_up(&self.link)?;
                    caught_up = true;
                }
                TicketAction::Claim => {
                    let Some(KnownJob { revision, record }) = chosen else { continue };
                    let starts = matches!(wanted, Wanted::Any { starts: true });
                    let mut job = JobRecord::clone(&record);
                    rules::claim(&mut job, &self.link.id, ticket, starts, now());
                    match self.update(&job, revision)? {
                        WriteOutcome::Revision(revision) => return Ok(Ok(self.hold(job, revision, acker))),
                        // Another worker was faster; it may take a moment until that is known here.
                        WriteOutcome::Conflict => self.replica.catch_up(&self.link)?,
                    }
                }
                TicketAction::Recover => {
                    if let Some(job) = job {
                        recover(&self.link, &self.replica, job)?;
                    }
                    self.replica.catch_up(&self.link)?;
                }
                TicketAction::Keep => {
                    // Redelivered although this worker runs it: the servers could not be reached.
                    let id = job.map(|job| job.record.id.clone()).unwrap_or_default();
                    if let Some(held) = lock(&self.held).get_mut(&id) {
                        held.acker = Arc::clone(acker);
                    }
                    return Ok(Err(Release::Leave));
                }
                TicketAction::Remove => return Ok(Err(Release::Ack)),
                TicketAction::Return => return Ok(Err(Release::Return(NAK_DELAY))),
                TicketAction::ReturnLater => {
                    return Ok(Err(Release::Return(self.link.config.ack_wait / 4)));
                }
            }
        }
        Ok(Err(Release::Leave))
    }

    /// The job that names a ticket.
    fn named(&self, ticket: TicketId) -> (Named, Option<KnownJob>) {
        let used = self.replica.state().ticket_use(ticket);
        match used {
            TicketUse::Unused => (Named::Nobody, None),
            TicketUse::Spent => (Named::Ended, None),
            TicketUse::Running(job) => {
                let worker = job.record.worker.clone().unwrap_or_default();
                let is_own = worker == self.link.id;
                let named = if is_own && lock(&self.held).contains_key(&job.record.id) {
                    Named::Own
                } else if !is_own && self.replica.may_be_alive(&worker) {
                    Named::Running
                } else {
                    Named::Abandoned
                };
                (named, Some(job))
            }
        }
    }

    /// Keeps the ticket of a claimed job.
    fn hold(&self, job: JobRecord, revision: u64, acker: &Arc<Acker>) -> Arc<JobRecord> {
        let ticket = job.ticket_id().unwrap_or(TicketId { stored: 0, sequence: 0 });
        let held =
            HeldTicket { ticket, acker: Arc::clone(acker), began: job.began, suspected: job.is_suspected() };
        lock(&self.held).insert(job.id.clone(), held);
        if let Err(error) = self.replica.wait_for(revision) {
            tracing::warn!(job = job.id, %error, "a claim is not known here yet");
        }
        Arc::new(job)
    }

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
                let changes = rules::is_claimed_by(job, &own, ticket) && !job.began;
                job.began = true;
                changes
            });
            if let Err(error) = changed.await {
                tracing::warn!(job = id, %error, "can't record that a job is being generated");
            }
        };
        if is_planning {
            let _ = self.link.wait(recording);
        } else {
            self.link.handle().spawn(recording);
        }
    }

    /// The next job to claim.
    fn choose(&self, model: &str, wanted: Wanted<'_>) -> Option<KnownJob> {
        match wanted {
            Wanted::Any { .. } => self.chosen(model),
            Wanted::Batch(key, room) => self.batchable(model, key, room),
        }
    }

    /// The next job that this worker may run. `may_run` locks the replica, so it is called after `choose`.
    fn chosen(&self, model: &str) -> Option<KnownJob> {
        let mut refused = HashSet::new();
        loop {
            let next = self.replica.state().choose(model, |job| !refused.contains(&job.id))?;
            if self.may_run(&next.record) {
                return Some(next);
            }
            refused.insert(next.record.id.clone());
        }
    }

    /// The next job that fits into a batch.
    fn batchable(&self, model: &str, key: &str, room: u32) -> Option<KnownJob> {
        let next = self.replica.state().choose_batchable(model, key, room);
        next.filter(|job| self.may_run(&job.record))
    }

    fn update(&self, job: &JobRecord, revision: u64) -> Result<WriteOutcome> {
        let (link, job) = (Arc::clone(&self.link), job.clone());
        self.link.wait(async move { link.update(&JobRecord::record_key(&job.id), &job, revision).await })?
    }

    /// Changes the record of a job that this worker holds. `change` returns false to leave it as it is. Returns false
    /// if the job is not this worker's any more, or the record was left as it is.
    pub(super) fn change_own(
        &self,
        id: &str,
        mut change: impl FnMut(&mut JobRecord) -> Result<bool>,
    ) -> Result<bool> {
        let Some(held) = lock(&self.held).get(id).cloned() else { return Ok(false) };
        loop {
            let (link, key) = (Arc::clone(&self.link), JobRecord::record_key(id));
            let entry = self.link.wait(async move { link.entry(&key).await })??;
            let Some(entry) = entry.filter(|entry| entry.is_present) else { return Ok(false) };
            let mut job: JobRecord = serde_json::from_slice(&entry.value)
                .map_err(|error| FleetError(format!("the record of job {id} can't be read: {error}")))?;
            if !rules::is_claimed_by(&job, &self.link.id, held.ticket) || !change(&mut job)? {
                return Ok(false);
            }
            if let WriteOutcome::Revision(_) = self.update(&job, entry.revision)? {
                return Ok(true);
            }
        }
    }

    /// Records the end of a job, or returns it to the queue for another try, and releases its ticket. Returns whether
    /// it has ended.
    pub(super) fn finish(&self, end: &crate::store::JobEnd) -> Result<bool> {
        let mut ended = true;
        let is_aside = end.error.as_ref().is_some_and(|(code, _)| OF_WORKER.contains(&code.as_str()));
        let changed = self.change_own(&end.id, |job| {
            // An attempt that ended because another worker took the job, which this one has claimed again since.
            if end.state == JobState::Cancelled && !job.cancel && !job.stop_at_preview {
                ended = false;
                rules::give_back(job);
                return Ok(true);
            }
            job.notes.clone_from(&end.notes);
            job.error.clone_from(&end.error);
            job.finished = Some(end.finished);
            job.state = end.state;
            ended = true;
            if end.state == JobState::Failed && is_aside {
                ended = false;
                rules::set_aside(job, &self.link.id);
            } else if end.state == JobState::Failed && end.retry {
                ended = rules::fail(job, &self.link.id, self.link.config.give_up);
                if ended {
                    bury(&self.link, job);
                }
            }
            Ok(true)
        })?;
        let Some(held) = lock(&self.held).remove(&end.id) else { return Ok(ended) };
        let release = match (changed, ended) {
            (true, true) => Release::Ack,
            (true, false) if is_aside => Release::Return(ASIDE_DELAY),
            (true, false) => Release::Return(Duration::ZERO),
            // It ended and only the answer was lost, or another worker has it: the redelivered ticket settles which.
            (false, _) => Release::Leave,
        };
        self.release(&held.acker, release);
        Ok(ended)
    }

    /// Returns a job to the queue as if it had not been started.
    pub(super) fn give_back(&self, id: &str) -> Result<()> {
        let changed = self.change_own(id, |job| {
            rules::give_back(job);
            Ok(true)
        })?;
        let Some(held) = lock(&self.held).remove(id) else { return Ok(()) };
        self.release(&held.acker, if changed { Release::Return(Duration::ZERO) } else { Release::Leave });
        Ok(())
    }

    /// Returns jobs to the queue that name this worker although it does not have them: the answer to its claim was lost, and
    /// so was the ticket whose redelivery would have shown that. `unheld` holds the records of such jobs by key and revision,
    /// and since when.
    pub(super) fn return_unheld(&self, unheld: &mut HashMap<(String, u64), Instant>) -> Result<()> {
        let jobs: Vec<KnownJob> = self.replica.state().jobs.values().cloned().collect();
        let is_unheld = |job: &&KnownJob| {
            let is_own = job.record.worker.as_deref() == Some(self.link.id.as_str());
            job.record.state == JobState::Running && is_own && !lock(&self.held).contains_key(&job.record.id)
        };
        let mut since = HashMap::new();
        for job in jobs.iter().filter(is_unheld) {
            let key = (JobRecord::record_key(&job.record.id), job.revision);
            let first = unheld.get(&key).copied().unwrap_or_else(Instant::now);
            since.insert(key, first);
            if first.elapsed() > self.link.config.ack_wait {
                let mut returned = JobRecord::clone(&job.record);
                rules::give_back(&mut returned);
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

/// Takes a job from a worker that is gone, unless its record has changed; blocks.
pub(super) fn recover(link: &Arc<Link>, replica: &Replica, job: KnownJob) -> Result<()> {
    let mut changed = JobRecord::clone(&job.record);
    let is_alive = |worker: &str| replica.is_alive(worker);
    let given_up = rules::recover(&mut changed, is_alive, link.config.give_up, now());
    tracing::warn!(job = changed.id, worker = job.record.worker, "taking a job from a worker that is gone");
    if given_up {
        bury(link, &changed);
    }
    let (writer, key) = (Arc::clone(link), JobRecord::record_key(&changed.id));
    link.wait(async move { writer.update(&key, &changed, job.revision).await })??;
    Ok(())
}

/// Writes a dead letter for a job that is given up. Its record says so in any case.
fn bury(link: &Arc<Link>, job: &JobRecord) {
    tracing::error!(job = job.id, error = ?job.error, "giving a job up: see `kiln queue dead`");
    let (writer, letter) = (Arc::clone(link), job.clone());
    let buried = link.wait(async move { writer.publish_dead(&letter).await });
    if let Err(error) = buried.and_then(|buried| buried) {
        tracing::error!(job = job.id, %error, "can't write a dead letter");
    }
}

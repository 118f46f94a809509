//! Tickets on a worker: pulling them, claiming jobs with them, and releasing them. The parent module has the rules.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::message::{AckKind, Acker, Message};
use futures_util::StreamExt;
use kiln_base::lock;

use super::link::{FleetError, Link, Result, WriteOutcome, is_present};
use super::records::JobRecord;
use super::replica::{KnownJob, Replica, TicketUse};
use crate::generator::name;
use crate::store::{JobState, now};

/// A job that has killed this many workers is given up.
const MAX_KILLS: u32 = 2;
/// A job that has failed this many times is given up.
const MAX_FAILURES: u32 = 3;

/// How long a ticket is left to other workers if this one can't run what is queued.
const NAK_DELAY: Duration = Duration::from_millis(300);

/// A claimed job's ticket.
#[derive(Clone)]
pub(super) struct HeldTicket {
    pub(super) ticket: u64,
    acker: Arc<Acker>,
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

impl Tickets {
    pub(super) fn new(link: &Arc<Link>, replica: &Arc<Replica>) -> Tickets {
        Tickets {
            link: Arc::clone(link),
            replica: Arc::clone(replica),
            held: Mutex::default(),
            capabilities: Mutex::default(),
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

    /// Pulls up to `count` tickets of a model, without waiting for new ones.
    fn pull(&self, model: &str, count: usize) -> Result<Vec<Message>> {
        let (link, model) = (Arc::clone(&self.link), model.to_owned());
        let known = lock(&self.consumers).get(&model).cloned();
        let (consumer, messages) = self.link.wait(async move {
            let consumer = match known {
                Some(consumer) => consumer,
                None => link.consumer(&model).await?,
            };
            let fetch = consumer.fetch().max_messages(count).expires(Duration::from_secs(2));
            let mut batch = fetch.messages().await.map_err(|error| FleetError(error.to_string()))?;
            let mut messages = Vec::new();
            while let Some(message) = batch.next().await {
                messages.push(message.map_err(|error| FleetError(error.to_string()))?);
            }
            Ok::<_, FleetError>(((model, consumer), messages))
        })??;
        lock(&self.consumers).insert(consumer.0, consumer.1);
        Ok(messages)
    }

    /// Forgets the consumers: they may be gone with the server's state.
    pub(super) fn forget_consumers(&self) {
        lock(&self.consumers).clear();
    }

    /// Pulls a ticket of a model and claims a job with it. Returns the job, and whether there was a ticket.
    pub(super) fn claim(&self, model: &str) -> Result<(Option<Arc<JobRecord>>, bool)> {
        let messages = self.pull(model, 1)?;
        let found = !messages.is_empty();
        let mut claimed = None;
        for message in messages {
            claimed = self.use_ticket(model, message, None)?;
        }
        Ok((claimed, found))
    }

    /// Pulls tickets for jobs that fit into one batch, up to `room` images.
    pub(super) fn claim_batch(&self, model: &str, key: &str, mut room: u32) -> Result<Vec<Arc<JobRecord>>> {
        let mut jobs = Vec::new();
        while room > 0 {
            if self.batchable(model, key, room).is_none() {
                break;
            }
            let Some(message) = self.pull(model, 1)?.pop() else { break };
            let Some(job) = self.use_ticket(model, message, Some((key, room)))? else { break };
            room = room.saturating_sub(crate::work::image_count(&job.request));
            jobs.push(job);
        }
        Ok(jobs)
    }

    /// Claims a job with a ticket, or releases the ticket.
    fn use_ticket(
        &self,
        model: &str,
        message: Message,
        batch: Option<(&str, u32)>,
    ) -> Result<Option<Arc<JobRecord>>> {
        let Ok(info) = message.info() else { return Ok(None) };
        let (ticket, delivered, pending) = (info.stream_sequence, info.delivered, info.pending);
        self.pending.store(pending, SeqCst);
        let (message, acker) = message.split();
        let acker = Arc::new(acker);
        let released = match serde_json::from_slice::<JobRecord>(&message.payload) {
            Ok(own) => self.try_claim(model, own, ticket, delivered, batch, &acker),
            Err(error) => {
                tracing::error!(ticket, %error, "refusing a ticket that can't be read");
                Ok(Err(Release::Refuse))
            }
        };
        match released {
            Ok(Ok(job)) => Ok(Some(job)),
            Ok(Err(release)) => {
                self.release(&acker, release);
                Ok(None)
            }
            Err(error) => {
                // The ticket is redelivered after a while.
                tracing::warn!(ticket, %error, "could not claim a job");
                Ok(None)
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
        own: JobRecord,
        ticket: u64,
        delivered: i64,
        batch: Option<(&str, u32)>,
        acker: &Arc<Acker>,
    ) -> Result<std::result::Result<Arc<JobRecord>, Release>> {
        let pulled = Instant::now();
        if own.model != model {
            tracing::error!(job = own.id, "refusing a ticket of another model");
            return Ok(Err(Release::Refuse));
        }
        self.restore(own, ticket)?;
        if delivered > 1 {
            self.redelivered.fetch_add(1, SeqCst);
            self.replica.catch_up(&self.link)?;
            match self.ticket_use(ticket) {
                TicketUse::Unused => {}
                TicketUse::Spent => return Ok(Err(Release::Ack)),
                TicketUse::Running(job) => return self.take_over(job, ticket, acker),
            }
        }
        let mut caught_up = false;
        loop {
            if pulled.elapsed() > self.link.config.ack_wait / 2 {
                return Ok(Err(Release::Leave));
            }
            let chosen = match batch {
                None => self.chosen(model),
                Some((key, room)) => self.batchable(model, key, room),
            };
            let Some(KnownJob { revision, record }) = chosen else {
                if batch.is_some() {
                    return Ok(Err(Release::Return(Duration::ZERO)));
                }
                if !std::mem::replace(&mut caught_up, true) {
                    self.replica.catch_up(&self.link)?;
                    continue;
                }
                // Other workers may be able to run what is queued.
                let others = self.has_queued(model);
                return Ok(Err(if others { Release::Return(NAK_DELAY) } else { Release::Ack }));
            };
            let mut job = JobRecord::clone(&record);
            self.mark_claimed(&mut job, ticket);
            match self.update(&job, revision)? {
                WriteOutcome::Revision(revision) => {
                    self.replica.wait_for(revision)?;
                    return self.keep_claim(job, revision, ticket, acker);
                }
                // Another worker was faster; it may take a moment until that is known here.
                WriteOutcome::Conflict => self.replica.catch_up(&self.link)?,
            }
        }
    }

    fn ticket_use(&self, ticket: u64) -> TicketUse {
        self.replica.state().ticket_use(ticket)
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

    /// Creates the record of a ticket's own job if the gateway died before it did.
    fn restore(&self, mut own: JobRecord, ticket: u64) -> Result<()> {
        if self.replica.state().jobs.contains_key(&own.id) {
            return Ok(());
        }
        let (link, key) = (Arc::clone(&self.link), JobRecord::record_key(&own.id));
        own.sequence = ticket;
        own.return_to_queue();
        let created = self.link.wait(async move {
            // The job of a deleted record has ended.
            if link.entry(&key).await?.is_some() {
                return Ok(None);
            }
            tracing::warn!(job = own.id, "restoring the record of a job from its ticket");
            link.create(&key, &own).await.map(Some)
        })??;
        if let Some(WriteOutcome::Revision(revision)) = created {
            self.replica.wait_for(revision)?;
        }
        Ok(())
    }

    fn mark_claimed(&self, job: &mut JobRecord, ticket: u64) {
        job.state = JobState::Running;
        job.worker = Some(self.link.id.clone());
        job.ticket = Some(ticket);
        job.attempts += 1;
        job.started = Some(now());
    }

    /// Checks that no earlier claim names the ticket, and holds it.
    fn keep_claim(
        &self,
        mut job: JobRecord,
        revision: u64,
        ticket: u64,
        acker: &Arc<Acker>,
    ) -> Result<std::result::Result<Arc<JobRecord>, Release>> {
        let is_own = match self.ticket_use(ticket) {
            TicketUse::Running(first) => first.record.id == job.id,
            TicketUse::Spent | TicketUse::Unused => false,
        };
        if !is_own {
            tracing::warn!(job = job.id, ticket, "returning a job: its ticket belongs to another one");
            job.attempts -= 1;
            job.return_to_queue();
            self.update(&job, revision)?;
            return Ok(Err(Release::Leave));
        }
        lock(&self.held).insert(job.id.clone(), HeldTicket { ticket, acker: Arc::clone(acker) });
        Ok(Ok(Arc::new(job)))
    }

    /// Takes over a running job whose worker is gone.
    fn take_over(
        &self,
        KnownJob { revision, record }: KnownJob,
        ticket: u64,
        acker: &Arc<Acker>,
    ) -> Result<std::result::Result<Arc<JobRecord>, Release>> {
        let worker = record.worker.clone().unwrap_or_default();
        if worker == self.link.id
            && let Some(held) = lock(&self.held).get_mut(&record.id)
        {
            // Redelivered although this worker is running it: the servers could not be reached.
            held.acker = Arc::clone(acker);
            return Ok(Err(Release::Leave));
        }
        if worker != self.link.id && self.replica.may_be_alive(&worker) {
            return Ok(Err(Release::Return(self.link.config.ack_wait / 4)));
        }
        if !self.may_run(&record) {
            return Ok(Err(Release::Return(NAK_DELAY)));
        }
        let mut job = JobRecord::clone(&record);
        job.kills += 1;
        job.history.push(format!("worker {worker} died while running it"));
        tracing::warn!(job = job.id, worker, "taking over a job: its worker is gone");
        if job.cancel {
            job.state = JobState::Cancelled;
            job.error = Some(("cancelled".into(), "cancelled".into()));
            job.finished = Some(now());
        } else if job.kills >= MAX_KILLS {
            let message = "two workers died while this job was running; it is not tried again";
            job.error = Some(("interrupted".into(), message.into()));
            self.move_to_dead_letters(&mut job)?;
        } else {
            self.mark_claimed(&mut job, ticket);
        }
        match self.update(&job, revision)? {
            WriteOutcome::Conflict => Ok(Err(Release::Return(Duration::from_millis(50)))),
            WriteOutcome::Revision(_) if job.state.is_final() => Ok(Err(Release::Ack)),
            WriteOutcome::Revision(revision) => {
                self.replica.wait_for(revision)?;
                self.keep_claim(job, revision, ticket, acker)
            }
        }
    }

    fn update(&self, job: &JobRecord, revision: u64) -> Result<WriteOutcome> {
        let (link, job) = (Arc::clone(&self.link), job.clone());
        self.link.wait(async move { link.update(&JobRecord::record_key(&job.id), &job, revision).await })?
    }

    /// Writes a dead letter for a job, and sets the job to failed.
    fn move_to_dead_letters(&self, job: &mut JobRecord) -> Result<()> {
        job.state = JobState::Failed;
        job.finished = Some(now());
        tracing::error!(job = job.id, error = ?job.error, "giving a job up: see `kiln queue dead`");
        let (link, subject) = (Arc::clone(&self.link), self.link.subject("dead", &job.id));
        let (id, letter) =
            (format!("{}-{}", job.id, job.attempts), serde_json::to_vec(&*job).unwrap_or_default());
        self.link.wait(async move { link.publish(subject, &id, letter.into()).await })??;
        Ok(())
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
            let Some(entry) = entry.filter(is_present) else { return Ok(false) };
            let mut job: JobRecord = serde_json::from_slice(&entry.value)
                .map_err(|error| FleetError(format!("the record of job {id} can't be read: {error}")))?;
            let is_own = job.worker.as_deref() == Some(&self.link.id)
                && job.ticket == Some(held.ticket)
                && job.state == JobState::Running;
            if !is_own || !change(&mut job)? {
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
        let changed = self.change_own(&end.id, |job| {
            job.notes.clone_from(&end.notes);
            job.error.clone_from(&end.error);
            job.finished = Some(end.finished);
            job.state = end.state;
            ended = true;
            if end.state == JobState::Failed && end.retry {
                job.failures += 1;
                let (code, message) = end.error.clone().unwrap_or_default();
                job.history.push(format!("failed on worker {}: {code}: {message}", self.link.id));
                job.failed_on.push(self.link.id.clone());
                if job.failures >= MAX_FAILURES {
                    self.move_to_dead_letters(job)?;
                } else {
                    ended = false;
                    job.finished = None;
                    job.return_to_queue();
                }
            }
            Ok(true)
        })?;
        let Some(held) = lock(&self.held).remove(&end.id) else { return Ok(ended) };
        let release = match (changed, ended) {
            (true, true) => Release::Ack,
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
            job.attempts = job.attempts.saturating_sub(1);
            job.return_to_queue();
            Ok(true)
        })?;
        let Some(held) = lock(&self.held).remove(id) else { return Ok(()) };
        self.release(&held.acker, if changed { Release::Return(Duration::ZERO) } else { Release::Leave });
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

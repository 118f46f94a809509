//! Tickets on a worker: pulling them, claiming jobs with them, and releasing them. The parent module has the rules.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::message::{AckKind, Acker, Message};
use futures_util::StreamExt;
use kiln_base::lock;

use super::bucket::WriteOutcome;
use super::capabilities::Capabilities;
use super::error::{FleetError, Result};
use super::link::Link;
use super::records::TicketId;
use super::recover::recover;
use super::replica::{KnownJob, Replica, TicketUse};
use super::rules::{self, Named, TicketAction, TicketView};
use super::withdrawn::Withdrawn;
use crate::jobs::job::Job;
use crate::jobs::store::now;
use crate::jobs::{Jobs, WeakJobs};

/// How long a ticket is left to other workers if this one can't run what is queued.
const NAK_DELAY: Duration = Duration::from_millis(300);
/// How long to wait for the ticket of a job that is known to be queued: its gateway publishes it after the record.
const TICKET_WAIT: Duration = Duration::from_millis(30);
/// How long the servers may take to answer that there is no ticket.
const PULL_LIMIT: Duration = Duration::from_secs(5);

/// A claimed job's ticket.
#[derive(Clone)]
pub(super) struct HeldTicket {
    pub(super) ticket: TicketId,
    pub(super) acker: Arc<Acker>,
    /// Whether the record says that the job is being generated.
    pub(super) began: bool,
    /// Whether the job may be what its workers died of.
    pub(super) suspected: bool,
    /// Whether this worker writes the job's end or returns it: its own change takes the job from it.
    pub(super) leaving: bool,
}

/// The tickets of a worker.
pub(super) struct Tickets {
    pub(super) link: Arc<Link>,
    pub(super) replica: Arc<Replica>,
    pub(super) held: Mutex<HashMap<String, HeldTicket>>,
    pub(super) capabilities: Mutex<Capabilities>,
    pub(super) withdrawn: Withdrawn,
    consumers: Mutex<HashMap<String, PullConsumer>>,
    /// The jobs of this worker; set once.
    jobs: OnceLock<WeakJobs>,
    /// Tickets that were still pending when the last one was pulled.
    pub(super) pending: AtomicU64,
    pub(super) redelivered: AtomicU64,
}

/// How to release a ticket.
pub(super) enum Release {
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
            jobs: OnceLock::new(),
            pending: AtomicU64::new(0),
            redelivered: AtomicU64::new(0),
        }
    }

    /// Updates what this worker can run.
    pub(super) fn update_capabilities(&self, jobs: &Jobs) {
        *lock(&self.capabilities) = Capabilities::new(jobs, &self.withdrawn.list());
    }

    pub(super) fn set_jobs(&self, jobs: WeakJobs) {
        let _ = self.jobs.set(jobs);
    }

    fn jobs(&self) -> Option<Jobs> {
        self.jobs.get().and_then(WeakJobs::upgrade)
    }

    /// Whether this worker may claim a job. Not while an earlier attempt at it has not ended here: that end would be
    /// the new one's.
    fn may_run(&self, job: &Job) -> bool {
        let is_held = lock(&self.held).contains_key(&job.id);
        let is_known =
            || self.jobs().is_some_and(|jobs| jobs.live(&job.id).is_some() || jobs.is_unrecorded(&job.id));
        !is_held && !is_known() && lock(&self.capabilities).may_run(job, &self.link.id, &self.replica)
    }

    /// Whether a job of this model is queued, even if this worker can't run it.
    pub(super) fn has_queued(&self, model: &str) -> bool {
        self.replica.state().queued(model) > 0
    }

    /// The queued job of a model that this worker would run next.
    pub(super) fn next_queued(&self, model: &str) -> Option<String> {
        self.chosen(model).map(|job| job.record.id.clone())
    }

    /// Pulls a ticket of a model; waits a moment for one if a job is known to be queued.
    fn pull(&self, model: &str, is_queued: bool) -> Result<Option<Message>> {
        let known = lock(&self.consumers).get(model).cloned();
        let (consumer, message) = self.link.wait(async {
            let consumer = match known {
                Some(consumer) => consumer,
                None => self.link.consumer(model).await?,
            };
            let pulled = async {
                let batch = if is_queued {
                    consumer.batch().max_messages(1).expires(TICKET_WAIT).messages().await
                } else {
                    // With a time to expire, the server would wait so long for a ticket.
                    consumer.fetch().max_messages(1).messages().await
                };
                let mut batch = batch.map_err(|error| FleetError(error.to_string()))?;
                batch.next().await.transpose().map_err(|error| FleetError(error.to_string()))
            };
            let pulled = tokio::time::timeout(PULL_LIMIT, pulled).await;
            let message = pulled.unwrap_or_else(|_| Err(FleetError("pulling a ticket timed out".into())))?;
            Ok::<_, FleetError>((consumer, message))
        })?;
        lock(&self.consumers).insert(model.to_owned(), consumer);
        Ok(message)
    }

    /// Forgets the consumers: they may be gone, or their stream, which is created again.
    pub(super) fn forget_consumers(&self) {
        lock(&self.consumers).clear();
        if let Err(error) = self.link.wait(self.link.restore_stream(&self.link.jobs)) {
            tracing::warn!(%error, "can't pull tickets");
        }
    }

    /// Pulls a ticket of a model and claims a job with it. Returns the job, and whether there was a ticket.
    pub(super) fn claim(&self, model: &str, starts: bool) -> Result<(Option<Arc<Job>>, bool)> {
        match self.pull(model, self.has_queued(model))? {
            Some(message) => Ok((self.use_ticket(model, message, Wanted::Any { starts }), true)),
            None => Ok((None, false)),
        }
    }

    /// Pulls tickets for jobs that fit into one batch, up to `room` images. After an error there may be fewer jobs; they are
    /// claimed and have to be run.
    pub(super) fn claim_batch(&self, model: &str, key: &str, mut room: u32) -> Vec<Arc<Job>> {
        let mut jobs = Vec::new();
        while room > 0 && self.choose(model, Wanted::Batch(key, room)).is_some() {
            let pulled = self.pull(model, false).unwrap_or_else(|error| {
                tracing::warn!(%error, "can't pull tickets for a batch");
                None
            });
            let Some(message) = pulled else { break };
            let Some(job) = self.use_ticket(model, message, Wanted::Batch(key, room)) else { break };
            room = room.saturating_sub(job.images());
            jobs.push(job);
        }
        jobs
    }

    /// Claims a job with a ticket, or releases the ticket.
    fn use_ticket(&self, model: &str, message: Message, wanted: Wanted<'_>) -> Option<Arc<Job>> {
        let info = message.info().ok()?;
        let stored = i64::try_from(info.published.unix_timestamp_nanos()).unwrap_or(0);
        let ticket = TicketId { stored, sequence: info.stream_sequence };
        if info.delivered > 1 {
            self.redelivered.fetch_add(1, SeqCst);
        }
        self.pending.store(info.pending, SeqCst);
        let (message, acker) = message.split();
        let acker = Arc::new(acker);
        let released = match serde_json::from_slice::<Job>(&message.payload) {
            Ok(own) if own.fleet.model == model => self.try_claim(model, ticket, wanted, &acker),
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

    pub(super) fn release(&self, acker: &Arc<Acker>, release: Release) {
        let kind = match release {
            Release::Ack => AckKind::Ack,
            Release::Return(after) => AckKind::Nak(Some(after)),
            Release::Refuse => AckKind::Term,
            Release::Leave => return,
        };
        let sent = self.link.wait(async {
            let sent = tokio::time::timeout(Duration::from_secs(2), acker.double_ack_with(kind));
            sent.await
                .map_err(|_| FleetError("timed out".into()))?
                .map_err(|error| FleetError(error.to_string()))
        });
        if let Err(error) = sent {
            tracing::debug!(%error, "can't acknowledge a ticket; it will be delivered again");
        }
    }

    fn try_claim(
        &self,
        model: &str,
        ticket: TicketId,
        wanted: Wanted<'_>,
        acker: &Arc<Acker>,
    ) -> Result<std::result::Result<Arc<Job>, Release>> {
        if self.jobs().is_some_and(|jobs| jobs.is_stopping()) {
            return Ok(Err(Release::Return(Duration::ZERO)));
        }
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
                    let mut job = Job::clone(&record);
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
                let worker = job.record.fleet.worker.clone().unwrap_or_default();
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
    fn hold(&self, job: Job, revision: u64, acker: &Arc<Acker>) -> Arc<Job> {
        let ticket = job.ticket_id().unwrap_or(TicketId { stored: 0, sequence: 0 });
        let held = HeldTicket {
            ticket,
            acker: Arc::clone(acker),
            began: job.fleet.began,
            suspected: job.runs_alone(),
            leaving: false,
        };
        lock(&self.held).insert(job.id.clone(), held);
        if let Err(error) = self.replica.wait_for(revision) {
            tracing::warn!(job = job.id, %error, "a claim is not known here yet");
        }
        Arc::new(job)
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

    pub(super) fn update(&self, job: &Job, revision: u64) -> Result<WriteOutcome> {
        self.link.wait(self.link.update(&Job::record_key(&job.id), job, revision))
    }
}

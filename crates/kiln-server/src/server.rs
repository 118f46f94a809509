//! The server's state: the job queue with its live jobs, and the operations on it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use kiln_base::{hex, lock, wait};
use kiln_engine::{FileRef, Request};
use tokio::sync::watch;

use crate::api::Caller;
use crate::api::a1111::options::A1111Options;
use crate::auth::Auth;
use crate::body_budget::{BodyBudget, SMALL_BODY};
use crate::config::Config;
use crate::decode_budget::DecodeBudget;
use crate::decoded_cache::DecodedCache;
use crate::downloads::Downloads;
use crate::ends::UnrecordedEnds;
use crate::fair_queue::{FairQueue, QueuedJob};
use crate::generator::{Catalogue, ErrorKind, JobError, LoadedModel, name};
use crate::keys::{ApiKey, JobRates};
use crate::live::{Api, LiveJob};
use crate::metrics::{Metrics, ServerStats};
use crate::store::{IdempotencyKey, JobEnd, JobRow, JobState, Store, StoreError, now};
use crate::webhooks::Webhooks;

/// A handle to the server. Clones share the same state.
#[derive(Clone)]
pub struct Server(Arc<ServerState>);

/// The shared state behind a [`Server`].
pub struct ServerState {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) metrics: Metrics,
    pub(crate) catalogue: Box<dyn Catalogue>,
    pub(crate) auth: Auth,
    job_rates: JobRates,
    pub(crate) decoded: DecodedCache,
    pub(crate) body_budget: Arc<BodyBudget>,
    pub(crate) decode_budget: DecodeBudget,
    pub(crate) downloads: Downloads,
    /// Set once no more jobs are accepted.
    pub(crate) closing: watch::Sender<bool>,
    /// Set once open connections must end.
    pub(crate) hang_up: watch::Sender<bool>,
    pub(crate) unrecorded: UnrecordedEnds,
    pub(crate) a1111: A1111Options,
    pub(crate) webhooks: Webhooks,
    loaded_models: Mutex<Option<Box<LoadedModels>>>,
    /// When the data folder was last found to be in order.
    storage_checked: Mutex<Option<Instant>>,
    queue: Mutex<Queue>,
    wake: Condvar,
    ready: AtomicBool,
}

/// Tells which models are in memory.
type LoadedModels = dyn Fn() -> Vec<LoadedModel> + Send;

#[derive(Default)]
struct Queue {
    /// Jobs that are not planned yet.
    waiting: FairQueue,
    /// Every job that has not ended, by id.
    live: HashMap<String, Arc<LiveJob>>,
    /// The clients of jobs that are being inserted into the database; they count towards the limits.
    inserting: Vec<String>,
    /// Planned and running jobs, oldest first. Until the generator gets them their state is `Queued`.
    active: Vec<Arc<LiveJob>>,
    stopping: bool,
}

impl Queue {
    /// Jobs that are planned or being planned and wait for the generator.
    fn planned(&self) -> impl Iterator<Item = &Arc<LiveJob>> {
        self.active.iter().filter(|live| live.state() == JobState::Queued)
    }

    fn queued_count(&self) -> usize {
        self.waiting.len() + self.inserting.len() + self.planned().count()
    }

    fn push(&mut self, job: QueuedJob, live: Arc<LiveJob>) {
        self.waiting.push(job);
        self.live.insert(live.id.clone(), live);
    }
}

/// What happened while a planned group waited for the generator.
pub(crate) enum GroupEvent {
    /// The generator is idle: generate the group.
    GeneratorIdle,
    /// These jobs can be generated in the same batch.
    Join(Vec<Arc<LiveJob>>),
    /// A job of the group was cancelled.
    Cancelled,
    /// The server is stopping.
    Stopping,
}

/// A job to accept.
pub(crate) struct NewJob {
    pub(crate) request: Request,
    pub(crate) caller: Caller,
    pub(crate) api: Api,
    /// A client waits for it on an open connection.
    pub(crate) attached: bool,
    pub(crate) key: Option<IdempotencyKey>,
    /// The address to call at its end.
    pub(crate) webhook: Option<String>,
}

impl NewJob {
    /// A job that nobody waits for on a connection.
    pub(crate) fn queued(request: Request, caller: Caller, api: Api) -> NewJob {
        NewJob { attached: false, ..NewJob::attached(request, caller, api) }
    }

    /// A job that a client waits for.
    pub(crate) fn attached(request: Request, caller: Caller, api: Api) -> NewJob {
        NewJob { request, caller, api, attached: true, key: None, webhook: None }
    }
}

/// Why a job was not accepted.
#[derive(Debug)]
pub(crate) enum SubmitError {
    /// The queue is full, or this client's share of it.
    QueueFull {
        retry_after_seconds: u64,
        client_limit: bool,
    },
    /// This client submits jobs too fast.
    RateLimited {
        retry_after_seconds: u64,
    },
    Stopping,
    /// An earlier request has the same idempotency key. The id of its job, if it asked for the same.
    Repeated(Option<String>),
    Store(StoreError),
}

/// A handle that doesn't keep the server's state alive.
pub(crate) struct WeakServer(Weak<ServerState>);

impl WeakServer {
    pub(crate) fn upgrade(&self) -> Option<Server> {
        self.0.upgrade().map(Server)
    }
}

impl std::ops::Deref for Server {
    type Target = ServerState;

    fn deref(&self) -> &ServerState {
        &self.0
    }
}

impl Server {
    /// Opens the data folder and puts unfinished jobs back into the queue.
    pub fn open(config: Config, catalogue: Box<dyn Catalogue>) -> Result<Server, StoreError> {
        let store = Store::open(&config.folder)?;
        let server = Server(Arc::new(ServerState {
            auth: Auth::new(&config.api_keys, store.sessions()?, config.wrong_key_delay),
            job_rates: JobRates::default(),
            decoded: DecodedCache::default(),
            // Half of it is one client's share, and holds its largest body.
            body_budget: BodyBudget::new(
                config.limits.small_bodies.max(2 * SMALL_BODY),
                config.limits.bodies.max(2 * config.limits.body),
                config.io_timeout,
            ),
            decode_budget: DecodeBudget::new(config.limits.all_decoding),
            downloads: Downloads::default(),
            closing: watch::Sender::new(false),
            hang_up: watch::Sender::new(false),
            unrecorded: UnrecordedEnds::default(),
            a1111: A1111Options::default(),
            webhooks: Webhooks::default(),
            loaded_models: Mutex::new(None),
            storage_checked: Mutex::new(None),
            queue: Mutex::default(),
            wake: Condvar::new(),
            ready: AtomicBool::new(false),
            metrics: Metrics::default(),
            config,
            store,
            catalogue,
        }));
        server.resume_unfinished()?;
        for job in server.store.uncalled_webhooks()? {
            server.webhooks.call(&server, &job);
        }
        Ok(server)
    }

    /// The data folder.
    pub fn folder(&self) -> &std::path::Path {
        &self.config.folder
    }

    pub(crate) fn downgrade(&self) -> WeakServer {
        WeakServer(Arc::downgrade(&self.0))
    }

    /// Puts a stored job into the queue.
    pub(crate) fn enqueue(&self, live: LiveJob) {
        let queued = self.queued_job(&live);
        self.queue().push(queued, Arc::new(live));
    }

    /// Replaces the API keys. Sessions of keys that are gone end.
    pub fn set_api_keys(&self, keys: &[ApiKey]) {
        self.auth.set_keys(keys);
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Accepts a job.
    pub(crate) fn submit(&self, new: NewJob) -> Result<Arc<LiveJob>, SubmitError> {
        let NewJob { mut request, caller, api, attached, key, webhook } = new;
        let client = caller.client.clone();
        // Choose the seed now, so that a retry generates the same image.
        if request.seed.is_empty() {
            request.seed = vec![random_seed()];
        }
        // Fill in the defaults: clients see the effective format.
        request.output_format.get_or_insert_default();
        request.png.get_or_insert_default();
        let id = hex(random_bytes::<12>());
        let mut live = LiveJob::new(id, client.clone(), request, api, attached);
        live.cost = self.cost(&live.request);
        let live = Arc::new(live);
        let queued = self.queued_job(&live);
        let row = JobRow {
            id: live.id.clone(),
            client: live.client.clone(),
            attached,
            request: live.request.clone(),
            unreadable: None,
            state: JobState::Queued,
            attempts: 0,
            created: live.created,
            started: None,
            finished: None,
            error: None,
            notes: Vec::new(),
        };
        self.reserve_slot(&caller)?;
        // Not under the lock: the generating thread takes it too and must not wait for the disk.
        let inserted = self.store.insert(&row, key.as_ref(), webhook.as_deref());
        {
            let mut queue = self.queue();
            if let Some(index) = queue.inserting.iter().position(|inserting| *inserting == client) {
                queue.inserting.swap_remove(index);
            }
            if let Some(earlier) = inserted.map_err(SubmitError::Store)? {
                return Err(SubmitError::Repeated(earlier));
            }
            if !queue.stopping {
                queue.push(queued, Arc::clone(&live));
                drop(queue);
                self.wake.notify_all();
                // Inside the request's span: the log links the request's id with the job's.
                tracing::info!(job = live.id, client = live.client, "job queued");
                return Ok(live);
            }
        }
        self.end_unstarted(&live, stopping_error());
        Err(SubmitError::Stopping)
    }

    /// Reserves a place in the queue for a job of this client.
    fn reserve_slot(&self, caller: &Caller) -> Result<(), SubmitError> {
        let capacity = self.config.limits.queue;
        let (client, quotas) = (caller.client.as_str(), caller.quotas);
        // Besides the running one, a client may fill at most half of the queue.
        let max_jobs = quotas.jobs.unwrap_or(capacity / 2 + 1);
        let mut queue = self.queue();
        if queue.stopping {
            return Err(SubmitError::Stopping);
        }
        let clients = queue.live.values().map(|live| &live.client).chain(&queue.inserting);
        let client_limit = clients.filter(|other| *other == client).count() >= max_jobs;
        if queue.queued_count() >= capacity || client_limit {
            let running: f64 = queue.active.iter().map(|live| live.cost).sum();
            let turns = if client_limit { 1 } else { queue.waiting.len() / 4 };
            let retry_after_seconds = self.estimate_seconds(running + queue.waiting.cost_of_next(turns));
            self.metrics.job_refused();
            return Err(SubmitError::QueueFull { retry_after_seconds, client_limit });
        }
        if let Some(per_minute) = quotas.jobs_per_minute {
            let limited = |retry_after_seconds| SubmitError::RateLimited { retry_after_seconds };
            self.job_rates.take(client, per_minute).map_err(limited)?;
        }
        queue.inserting.push(client.to_owned());
        Ok(())
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

    /// Waits for the next event of a planned group: jobs with up to `room` images that can join it, a cancelled member,
    /// or an idle generator. A group never waits for others to join.
    pub(crate) fn wait_for_group_event(
        &self,
        first: &LiveJob,
        room: u32,
        generator_idle: &AtomicBool,
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
            generator_idle.swap(false, SeqCst).then_some(GroupEvent::GeneratorIdle)
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

    /// Drops a job that was not started when the server stops; it stays queued in the database.
    pub(crate) fn abandon_unstarted(&self, live: &LiveJob) {
        self.remove_job(&live.id);
        live.change(|s| s.error = Some(stopping_error()));
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

    /// Drops the decoded input images of a job, except those that an unplanned job needs.
    pub(crate) fn release_inputs(&self, live: &LiveJob) {
        live.set_planned();
        let unneeded: Vec<&FileRef> = {
            let queue = self.queue();
            let needed = |image: &FileRef| {
                let mut others = queue.live.values().filter(|other| !other.is_planned());
                others.any(|other| other.request.images().any(|other| other == image))
            };
            live.request.images().filter(|image| !needed(image)).collect()
        };
        unneeded.iter().for_each(|image| self.decoded.remove(name(&image.path)));
    }

    /// Cancels a job; returns whether there was one to cancel. Doesn't wait for the disk.
    pub(crate) fn cancel(&self, id: &str) -> bool {
        let mut queue = self.queue();
        let Some(live) = queue.live.get(id).cloned() else { return false };
        live.cancel();
        if queue.waiting.remove(id) {
            drop(queue);
            self.end_unstarted(&live, JobError::cancelled());
        } else {
            drop(queue);
            self.wake.notify_all();
        }
        true
    }

    /// Ends a job that was never started.
    fn end_unstarted(&self, live: &LiveJob, error: JobError) {
        self.release_inputs(live);
        let cancelled = error.kind == ErrorKind::Cancelled;
        let state = if cancelled { JobState::Cancelled } else { JobState::Failed };
        let end = JobEnd {
            id: live.id.clone(),
            state,
            error: Some((error.code.into(), error.message.clone())),
            notes: Vec::new(),
            finished: now(),
        };
        // Before it leaves the queue: then it is always found, here or there.
        self.record_end_soon(end, Duration::ZERO);
        self.remove_job(&live.id);
        self.metrics.job(state, None, Duration::ZERO, live.cost);
        tracing::info!(job = live.id, client = live.client, state = state.name(), "job ended in the queue");
        live.change(|s| (s.state, s.error) = (state, Some(error)));
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
        let ids = self.queue().waiting.reorder(client, order);
        self.store.set_order(&ids)
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

    pub(crate) fn stats(&self) -> ServerStats {
        let (queued, running) = {
            let queue = self.queue();
            (queue.queued_count(), queue.active.len() - queue.planned().count())
        };
        let saved_images = self.store.count_images().unwrap_or(0);
        let models = lock(&self.loaded_models).as_ref().map(|loaded| loaded()).unwrap_or_default();
        ServerStats {
            queued,
            running,
            queue_capacity: self.config.limits.queue,
            saved_images,
            decoding_peak: self.decode_budget.peak(),
            models,
        }
    }

    /// Sets the function that tells which models are in memory.
    pub(crate) fn set_loaded_models(&self, loaded: impl Fn() -> Vec<LoadedModel> + Send + 'static) {
        *lock(&self.loaded_models) = Some(Box::new(loaded));
    }

    pub(crate) fn set_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Whether jobs are processed: the model is loaded and the server is not stopping.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst) && !*self.closing.borrow()
    }

    /// Checks that the data folder can be written; a recent result is used again.
    pub(crate) fn check_storage(&self) -> Result<(), StoreError> {
        const RECENT: Duration = Duration::from_secs(1);
        let mut checked = lock(&self.storage_checked);
        if checked.is_some_and(|at| at.elapsed() < RECENT) {
            return Ok(());
        }
        self.store.check()?;
        *checked = Some(Instant::now());
        Ok(())
    }

    /// Stops accepting jobs, and reports so to probes. Queued jobs stay in the database; those whose clients wait on a
    /// connection fail.
    pub fn close(&self) {
        let waiting: Vec<Arc<LiveJob>> = {
            let mut queue = self.queue();
            if std::mem::replace(&mut queue.stopping, true) {
                return;
            }
            let is_active = |live: &LiveJob| queue.active.iter().any(|active| active.id == live.id);
            queue.live.values().filter(|live| !is_active(live)).cloned().collect()
        };
        self.wake.notify_all();
        for live in waiting {
            if live.attached {
                self.end_unstarted(&live, stopping_error());
            } else {
                live.change(|s| s.error = Some(stopping_error()));
            }
        }
        self.closing.send_replace(true);
    }

    /// Interrupts all active jobs; they resume at the next start.
    pub(crate) fn interrupt(&self) {
        self.active().iter().for_each(|live| live.interrupt());
    }
}

impl Queue {
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

pub(crate) fn stopping_error() -> JobError {
    JobError::server("shutting_down", "the server is stopping")
}

/// A job that a client waits for; dropping this cancels it.
pub(crate) struct AttachedJob {
    server: Server,
    pub(crate) live: Arc<LiveJob>,
}

impl AttachedJob {
    pub(crate) fn new(server: &Server, live: Arc<LiveJob>) -> AttachedJob {
        AttachedJob { server: server.clone(), live }
    }
}

impl Drop for AttachedJob {
    fn drop(&mut self) {
        if !self.live.state().is_final() {
            tracing::info!(job = self.live.id, "client disconnected, cancelling its job");
            self.server.cancel(&self.live.id);
        }
    }
}

/// A seed for a request without one: short enough to type.
pub(crate) fn random_seed() -> u64 {
    u32::from_be_bytes(random_bytes()).into()
}

/// Cryptographically secure random bytes.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Ids and sessions must not be guessable. The system's generator fails only in early boot.
    if getrandom::fill(&mut bytes).is_err() {
        std::process::abort();
    }
    bytes
}

//! The server's state: the job queue with its live jobs, and the operations on it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use kiln_base::{hex, lock, wait};
use kiln_engine::{FileRef, Request};
use tokio::sync::watch;

use crate::auth::Auth;
use crate::body_budget::{BodyBudget, SMALL_BODY};
use crate::decode_budget::DecodeBudget;
use crate::decoded_cache::DecodedCache;
use crate::downloads::Downloads;
use crate::fair_queue::{FairQueue, QueuedJob};
use crate::generator::{Catalogue, ErrorKind, JobError, name};
use crate::limits::Limits;
use crate::live::{Api, LiveJob};
use crate::metrics::{Metrics, ServerStats};
use crate::store::{JobRow, JobState, Store, StoreError};

/// A job during which the process died this often fails instead of being retried.
const MAX_ATTEMPTS: u32 = 2;

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Folder of the job database and the image files.
    pub folder: PathBuf,
    /// The API key that clients must send; `None` for no authentication.
    pub api_key: Option<String>,
    /// Host names accepted in the `Host` header, besides the local ones; `*` accepts any.
    pub hosts: Vec<String>,
    /// Limits on requests.
    pub limits: Limits,
    /// Maximum number of images in the gallery; the oldest are deleted.
    pub keep_images: u32,
    /// How long running jobs may continue at shutdown before they are returned to the queue.
    pub grace: Duration,
    /// Maximum duration of a job.
    pub job_timeout: Duration,
    /// How long a client may send nothing of a request's body, or read nothing of a response.
    pub io_timeout: Duration,
}

impl Config {
    /// The default configuration with its data in `folder`: local host names only, no API key.
    pub fn new(folder: impl Into<PathBuf>) -> Config {
        Config {
            folder: folder.into(),
            api_key: None,
            hosts: Vec::new(),
            limits: Limits::default(),
            keep_images: 10_000,
            grace: Duration::from_secs(20),
            job_timeout: Duration::from_secs(3600),
            io_timeout: Duration::from_secs(30),
        }
    }
}

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
    pub(crate) decoded: DecodedCache,
    pub(crate) body_budget: Arc<BodyBudget>,
    pub(crate) decode_budget: DecodeBudget,
    pub(crate) downloads: Downloads,
    pub(crate) closing: watch::Sender<bool>,
    queue: Mutex<Queue>,
    wake: Condvar,
    ready: AtomicBool,
}

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

/// Why a job was not accepted.
#[derive(Debug)]
pub(crate) enum SubmitError {
    /// The queue is full, or this client's share of it.
    QueueFull {
        retry_after_seconds: u64,
        client_limit: bool,
    },
    Stopping,
    Store(StoreError),
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
            auth: Auth::new(config.api_key.as_deref()),
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
            queue: Mutex::default(),
            wake: Condvar::new(),
            ready: AtomicBool::new(false),
            metrics: Metrics::default(),
            config,
            store,
            catalogue,
        }));
        server.resume_unfinished()?;
        Ok(server)
    }

    fn resume_unfinished(&self) -> Result<(), StoreError> {
        for job in self.store.unfinished()? {
            let failure = if job.attached {
                Some("the server restarted while the client waited")
            } else if job.attempts >= MAX_ATTEMPTS {
                Some("the server died repeatedly while this job was running; it is not retried")
            } else {
                None
            };
            if let Some(message) = failure {
                self.store.finish(&job.id, JobState::Failed, Some(("interrupted", message)), &[])?;
                continue;
            }
            tracing::info!(job = job.id, "job resumed");
            self.store.requeue(&job.id)?;
            let mut live = LiveJob::new(job.id, job.client, job.request, Api::Jobs, false);
            live.run_alone = job.attempts > 0;
            let queued = self.queued_job(&live);
            self.queue().push(queued, Arc::new(live));
        }
        self.store.clean_up(self.config.keep_images)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Accepts a job. If it is `attached`, a client waits for it on an open connection.
    pub(crate) fn submit(
        &self,
        mut request: Request,
        client: &str,
        api: Api,
        attached: bool,
    ) -> Result<Arc<LiveJob>, SubmitError> {
        // Choose the seed now, so that a retry generates the same image.
        if request.seed.is_empty() {
            request.seed = vec![random_seed()];
        }
        // Fill in the defaults: clients see the effective format.
        request.output_format.get_or_insert_default();
        request.png.get_or_insert_default();
        let id = hex(random_bytes::<12>());
        let live = Arc::new(LiveJob::new(id, client.to_owned(), request, api, attached));
        let queued = self.queued_job(&live);
        let row = JobRow {
            id: live.id.clone(),
            client: live.client.clone(),
            attached,
            request: live.request.clone(),
            state: JobState::Queued,
            attempts: 0,
            created: live.created,
            started: None,
            finished: None,
            error: None,
        };
        self.reserve_slot(client)?;
        // Not under the lock: the generating thread takes it too and must not wait for the disk.
        let inserted = self.store.insert(&row);
        {
            let mut queue = self.queue();
            if let Some(index) = queue.inserting.iter().position(|inserting| inserting == client) {
                queue.inserting.swap_remove(index);
            }
            inserted.map_err(SubmitError::Store)?;
            if !queue.stopping {
                queue.push(queued, Arc::clone(&live));
                drop(queue);
                self.wake.notify_all();
                return Ok(live);
            }
        }
        self.end_unstarted(&live, stopping_error());
        Err(SubmitError::Stopping)
    }

    /// Reserves a place in the queue for a job of this client.
    fn reserve_slot(&self, client: &str) -> Result<(), SubmitError> {
        let capacity = self.config.limits.queue;
        let mut queue = self.queue();
        if queue.stopping {
            return Err(SubmitError::Stopping);
        }
        let clients = queue.live.values().map(|live| &live.client).chain(&queue.inserting);
        // One client may fill at most half of the queue.
        let client_limit = clients.filter(|other| *other == client).count() > capacity / 2;
        if queue.queued_count() >= capacity || client_limit {
            let jobs = if client_limit { 1 } else { queue.queued_count() / 4 + 1 };
            let retry_after_seconds = self.estimate_seconds(jobs);
            self.metrics.job_refused();
            return Err(SubmitError::QueueFull { retry_after_seconds, client_limit });
        }
        queue.inserting.push(client.to_owned());
        Ok(())
    }

    fn queued_job(&self, live: &LiveJob) -> QueuedJob {
        QueuedJob {
            id: live.id.clone(),
            client: live.client.clone(),
            group_key: self.group_key(&live.request),
            batch_key: self.batch_key(live),
            images: image_count(&live.request),
            cost: self.cost(&live.request),
            ordered: false,
        }
    }

    /// Equal for two jobs that can run one after the other without loading anything.
    fn group_key(&self, request: &Request) -> String {
        let loras: Vec<_> = request.loras.iter().map(|lora| (&lora.path, lora.weight)).collect();
        let size = (request.width, request.height, request.references.len(), request.init.is_some());
        format!("{:?}", (&request.model, loras, &request.vae, size))
    }

    /// Equal for two jobs that can be generated in one batch, as far as the request tells; the generator checks again.
    /// `None` for a job that must run alone.
    fn batch_key(&self, live: &LiveJob) -> Option<String> {
        let request = &live.request;
        let sampling = (request.steps, request.guidance, &request.sigmas, request.schedule, request.rho);
        let start = (request.mask.is_some(), request.strength, request.max_tokens);
        (!live.run_alone).then(|| format!("{} {sampling:?} {start:?}", self.group_key(request)))
    }

    /// Estimated work: pixels times steps, in millions.
    fn cost(&self, request: &Request) -> f64 {
        let models = self.catalogue.models();
        let name = request.model.as_deref().map(name);
        let model = models.iter().find(|m| name.map_or(m.default, |name| *name == m.name));
        let (size, steps) = model.map_or((1024, 4), |m| (m.size, m.steps));
        let pixels = f64::from(request.width.unwrap_or(size)) * f64::from(request.height.unwrap_or(size));
        let steps = request.steps.unwrap_or(match request.sigmas.len() {
            0 => steps,
            levels => levels as u32,
        });
        let work = pixels * f64::from(steps) * f64::from(image_count(request));
        // Every step processes the references, too.
        (work * (1.0 + request.images().count() as f64) / 1e6).max(1e-3)
    }

    /// Estimates how long `jobs` jobs take, from recent ones.
    fn estimate_seconds(&self, jobs: usize) -> u64 {
        let each = self.metrics.recent_job_seconds().unwrap_or(2.0);
        (each * jobs as f64).ceil().clamp(1.0, 600.0) as u64
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

    /// Cancels a job; returns whether there was one to cancel.
    pub(crate) fn cancel(&self, id: &str) -> bool {
        let mut queue = self.queue();
        let Some(live) = queue.live.get(id).cloned() else { return false };
        live.cancel();
        if queue.waiting.remove(id) {
            queue.live.remove(id);
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
        if let Err(error) = self.store.finish(&live.id, state, Some((error.code, &error.message)), &[]) {
            tracing::error!(job = live.id, %error, "failed to record the end of a job");
        }
        self.metrics.job(state, None, Duration::ZERO);
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

    /// The number of jobs before this one in the queue.
    pub(crate) fn position(&self, id: &str) -> Option<usize> {
        let queue = self.queue();
        match queue.waiting.position(id) {
            Some(before) => Some(before + queue.planned().count()),
            None => queue.planned().position(|live| live.id == id),
        }
    }

    pub(crate) fn stats(&self) -> ServerStats {
        let (queued, running) = {
            let queue = self.queue();
            (queue.queued_count(), queue.active.len() - queue.planned().count())
        };
        let saved_images = self.store.count_images().unwrap_or(0);
        ServerStats {
            queued,
            running,
            queue_capacity: self.config.limits.queue,
            saved_images,
            decoding_peak: self.decode_budget.peak(),
        }
    }

    pub(crate) fn set_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Whether jobs are processed: the model is loaded and the server is not stopping.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst) && !*self.closing.borrow()
    }

    /// Stops accepting jobs. Queued jobs stay in the database; those whose clients wait on a connection fail.
    pub fn close(&self) {
        let waiting: Vec<Arc<LiveJob>> = {
            let mut queue = self.queue();
            queue.stopping = true;
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

/// The number of images a request asks for.
pub(crate) fn image_count(request: &Request) -> u32 {
    u32::try_from(request.image_count()).unwrap_or(u32::MAX)
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

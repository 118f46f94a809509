//! A worker: a server without an API, whose queue holds the jobs that it has claimed.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::jetstream::kv::Entry;
use bytes::Bytes;
use futures_util::StreamExt;
use kiln_base::lock;
use kiln_engine::Progress;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::FleetConfig;
use super::announce::Announcer;
use super::link::{FleetError, Link};
use super::lora_previews;
use super::objects::Objects;
use super::records::{ImageRecord, JobRecord};
use super::replica::{Follower, Replica};
use super::tickets::{Capabilities, Tickets};
use crate::api::probes;
use crate::generator::{Catalogue, Generator};
use crate::live::{Api, LiveJob};
use crate::server::WeakServer;
use crate::store::{
    Claim, GalleryLimits, IdempotencyKey, ImageRow, JobEnd, JobRow, JobState, Ledger, Marks, PlotRow, Store,
    StoreError, now,
};
use crate::traces::TraceContext;
use crate::work::batch_key;
use crate::{Config, Server};

type Result<T> = std::result::Result<T, StoreError>;

/// Assumed seconds to load a model that no worker has loaded yet.
const LOAD_SECONDS: f64 = 8.0;
/// How many jobs of one model run in a row before older ones of another.
const MAX_IN_A_ROW: u32 = 8;
/// How long a request for previews is kept that arrives before its job.
const PREVIEW_REQUEST_AGE: Duration = Duration::from_secs(10);

/// What a worker reports about a running job.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ProgressMessage {
    pub(super) phase: String,
    pub(super) image: u32,
    pub(super) images: u32,
    pub(super) step: u32,
    pub(super) steps: u32,
    pub(super) reused: u32,
    pub(super) tile: u32,
    pub(super) tiles: u32,
    pub(super) fraction: f32,
    pub(super) time_left: Option<f32>,
    pub(super) notes: Vec<String>,
}

/// A worker of a fleet.
pub struct FleetWorker {
    server: Server,
    tickets: Arc<Tickets>,
}

/// Connects a worker to the queue. `config` has a folder for temporary files, and the limits that requests must keep.
pub fn open_worker(
    config: Config,
    fleet: FleetConfig,
    catalogue: Box<dyn Catalogue>,
) -> std::result::Result<FleetWorker, FleetError> {
    let link = Link::open(fleet)?;
    let store = Store::open(&config.folder).map_err(|error| FleetError(error.to_string()))?;
    let store = Arc::new(store);
    let replica = Replica::new(&link);
    let tickets = Arc::new(Tickets::new(&link, &replica));
    let (outbox, messages) = mpsc::unbounded_channel();
    let preview_requests = Arc::new(Mutex::default());
    let ledger = WorkerLedger {
        tickets: Arc::clone(&tickets),
        store: Arc::clone(&store),
        outbox,
        sent_previews: Mutex::default(),
        server: Mutex::new(None),
    };
    let ledger = Arc::new(ledger);
    let files = Box::new(Objects::open(&link, &store)?);
    let server = Server::new(config, catalogue, store, Box::new(Arc::clone(&ledger)), files)
        .map_err(|error| FleetError(error.to_string()))?;
    *lock(&ledger.server) = Some(server.downgrade());
    link.handle().spawn(publish(Arc::downgrade(&link), messages));
    let worker = FleetWorker { server, tickets };
    worker.follow(&replica, &preview_requests);
    let caught_up = replica.catch_up(&link);
    caught_up?;
    worker
        .start_threads(&preview_requests)
        .map_err(|error| FleetError(format!("can't start threads: {error}")))?;
    Ok(worker)
}

/// Jobs whose previews somebody wants, and since when.
type PreviewRequests = Mutex<HashMap<String, Instant>>;

impl FleetWorker {
    /// The server behind it, for its probes and metrics.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Generates with these; the returned thread ends after [`FleetWorker::serve`].
    pub fn generate_with_all<G: Generator>(
        &self,
        generators: Vec<G>,
    ) -> std::io::Result<std::thread::JoinHandle<()>> {
        self.server.generate_with_all(generators)
    }

    /// Serves the probes and the metrics until `stop` completes, then drains.
    pub async fn serve(&self, listener: Option<tokio::net::TcpListener>, stop: impl Future<Output = ()>) {
        match listener {
            Some(listener) => {
                let app = probes(self.server.clone());
                crate::listen::serve_app(self.server.clone(), app, listener, stop).await;
            }
            None => {
                stop.await;
                self.server.close();
                crate::listen::finish_jobs(&self.server).await;
            }
        }
    }

    /// Returns the jobs that are still held to the queue, and deletes the worker's record. Blocks.
    pub fn leave(self) {
        let held: Vec<String> = lock(&self.tickets.held).keys().cloned().collect();
        for id in held {
            if let Err(error) = self.tickets.give_back(&id) {
                tracing::warn!(job = id, %error, "could not return a job; it goes to another worker after a while");
            }
        }
        let (link, key) = (Arc::clone(&self.tickets.link), format!("node.{}", self.tickets.link.id));
        let _ = self.tickets.link.wait(async move { link.delete(&key).await });
    }

    /// Follows the records: jobs that are cancelled or taken over by another worker, and new ones.
    fn follow(&self, replica: &Arc<Replica>, preview_requests: &Arc<PreviewRequests>) {
        let link = &self.tickets.link;
        let follower = HeldJobs { tickets: Arc::clone(&self.tickets), server: self.server.downgrade() };
        link.handle().spawn(Arc::clone(replica).follow(Arc::downgrade(link), follower));
        link.handle().spawn(lora_previews::answer(
            link.client.clone(),
            link.subject("lora", "preview"),
            self.server.downgrade(),
        ));
        let (subject, client) = (link.subject("watch", "*"), link.client.clone());
        let (server, preview_requests) = (self.server.downgrade(), Arc::clone(preview_requests));
        link.handle().spawn(async move {
            let Ok(mut wanted) = client.subscribe(subject).await else { return };
            while let Some(message) = wanted.next().await {
                let Some(id) = message.subject.rsplit('.').next() else { continue };
                let Some(server) = server.upgrade() else { return };
                match server.live(id) {
                    Some(live) => live.poll_preview(),
                    None => {
                        let mut preview_requests = lock(&preview_requests);
                        preview_requests
                            .retain(|_, since: &mut Instant| since.elapsed() < PREVIEW_REQUEST_AGE);
                        if preview_requests.len() < 10_000 {
                            preview_requests.insert(id.to_owned(), Instant::now());
                        }
                    }
                }
            }
        });
    }

    fn start_threads(&self, preview_requests: &Arc<PreviewRequests>) -> std::io::Result<()> {
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let server = self.server.downgrade();
        self.tickets.update_capabilities(&self.server);
        let tickets = Arc::downgrade(&self.tickets);
        let mut announcer = Announcer::new(&self.tickets.link, true)
            .leave_out(move || tickets.upgrade().map(|tickets| tickets.withdrawn.list()).unwrap_or_default());
        announcer.announce(&self.server);
        thread("announcing").spawn(move || announcer.run(&server, |_| {}))?;
        let (tickets, server) = (Arc::downgrade(&self.tickets), self.server.downgrade());
        let pause = self.tickets.link.config.ack_wait / 3;
        let mut unheld = HashMap::new();
        thread("in progress").spawn(move || {
            while let (Some(tickets), Some(server)) = (tickets.upgrade(), server.upgrade()) {
                tickets.in_progress(None);
                if let Err(error) = tickets.return_unheld(&mut unheld) {
                    tracing::warn!(%error, "can't return a job");
                }
                tickets.update_capabilities(&server);
                drop((tickets, server));
                std::thread::sleep(pause);
            }
        })?;
        let claimer = Claimer {
            tickets: Arc::clone(&self.tickets),
            server: self.server.downgrade(),
            preview_requests: Arc::clone(preview_requests),
            last_model: String::new(),
            in_a_row: 0,
            load_seconds: HashMap::new(),
            polled: Instant::now(),
            last_empty_pull: None,
        };
        thread("claiming").spawn(move || claimer.run())?;
        Ok(())
    }
}

/// Watches the records of the jobs that this worker holds.
struct HeldJobs {
    tickets: Arc<Tickets>,
    server: WeakServer,
}

impl Follower for HeldJobs {
    fn before(&self, entry: &Entry) {
        let Some(id) = entry.key.strip_prefix("job.") else { return };
        let Some(held) = lock(&self.tickets.held).get(id).map(|held| held.ticket) else { return };
        let Some(server) = self.server.upgrade() else { return };
        let record = serde_json::from_slice::<JobRecord>(&entry.value).ok();
        let own = &self.tickets.link.id;
        let is_own = record
            .as_ref()
            .is_some_and(|job| job.worker.as_ref() == Some(own) && job.ticket_id() == Some(held));
        if !is_own {
            tracing::warn!(job = id, "another worker has taken over a job");
            lock(&self.tickets.held).remove(id);
        }
        if let (Some(live), Some(job)) = (server.live(id), record) {
            apply_cancellation(&server, &live, &job, is_own);
        }
    }

    fn after(&self) {
        if let Some(server) = self.server.upgrade() {
            server.wake_all();
        }
    }

    fn lost(&self, _: &[String]) {
        let held = std::mem::take(&mut *lock(&self.tickets.held));
        let Some(server) = self.server.upgrade() else { return };
        held.keys().filter_map(|id| server.live(id)).for_each(|live| live.cancel());
        server.wake_all();
    }
}

/// Cancels a job, or stops it at a preview, if its record says so.
fn apply_cancellation(server: &Server, live: &LiveJob, job: &JobRecord, is_own: bool) {
    if !is_own || job.cancel || (job.stop_at_preview && !live.stop_with_preview()) {
        live.cancel();
        server.wake_all();
    }
}

impl Tickets {
    /// Updates what this worker can run.
    fn update_capabilities(&self, server: &Server) {
        let (models, withdrawn) = (server.catalogue.models(), self.withdrawn.list());
        let models = models.into_iter().filter(|model| withdrawn.iter().all(|(name, _)| *name != model.name));
        let models = models.map(|model| (server.catalogue.model_hash(&model.name), model.name));
        let capabilities = Capabilities {
            models: models.map(|(hash, name)| (name, hash)).collect(),
            loras: server.catalogue.loras(),
            vaes: server.catalogue.vaes(),
        };
        *lock(&self.capabilities) = capabilities;
    }
}

impl WorkerLedger {
    /// Takes no more jobs of a model that can't be loaded.
    fn withdraw(&self, model: &str, reason: &str) {
        self.tickets.withdrawn.insert(model, reason);
        if let Some(server) = lock(&self.server).as_ref().and_then(WeakServer::upgrade) {
            self.tickets.update_capabilities(&server);
        }
    }
}

/// The thread that claims jobs while there is room for them.
struct Claimer {
    tickets: Arc<Tickets>,
    server: WeakServer,
    preview_requests: Arc<PreviewRequests>,
    /// The model of the last job.
    last_model: String,
    /// How many jobs in a row had that model.
    in_a_row: u32,
    /// How long loading each model took here.
    load_seconds: HashMap<String, f64>,
    /// When tickets were last pulled without knowing of a queued job.
    polled: Instant,
    /// When the last pull found no ticket; `None` if it found one.
    last_empty_pull: Option<Instant>,
}

impl Claimer {
    fn run(mut self) {
        while let Some(server) = self.server.upgrade() {
            let poll = (self.tickets.link.config.ack_wait / 8).min(Duration::from_millis(500));
            let is_due = self.polled.elapsed() >= poll;
            let may_pull =
                self.last_empty_pull.is_none_or(|since| since.elapsed() > Duration::from_millis(20));
            let mut starts = false;
            let wanted = server.wait_for_room(Duration::from_millis(20), |free| {
                starts = free;
                if !free {
                    // Claim ahead only if there are enough pending tickets for all workers.
                    let workers = self.workers() as u64;
                    return self.tickets.pending.load(SeqCst) >= workers && may_pull && self.any_queued();
                }
                is_due || (may_pull && self.any_queued())
            });
            match wanted {
                None => return,
                Some(false) => {}
                Some(true) => self.claim(&server, is_due, starts),
            }
        }
    }

    fn any_queued(&self) -> bool {
        let models = lock(&self.tickets.capabilities).models.clone();
        models.iter().any(|(model, _)| self.tickets.has_queued(model))
    }

    fn workers(&self) -> usize {
        self.tickets.replica.nodes().iter().filter(|node| node.worker).count().max(1)
    }

    /// Claims one job: of the last job's model if that still has its turn, else of the most urgent model. `starts` says
    /// that a generator is free for it.
    fn claim(&mut self, server: &Server, poll: bool, starts: bool) {
        let loaded = server.loaded_models().into_iter();
        self.load_seconds.extend(loaded.map(|model| (model.name, model.load_seconds)));
        let mut models: Vec<String> =
            lock(&self.tickets.capabilities).models.iter().map(|(model, _)| model.clone()).collect();
        let stays = self.in_a_row < MAX_IN_A_ROW;
        {
            let state = self.tickets.replica.state();
            let is_last = |model: &String| stays && *model == self.last_model;
            models
                .sort_by_key(|model| (!is_last(model), state.urgency(model).is_none(), state.urgency(model)));
        }
        if poll {
            self.polled = Instant::now();
        }
        let mut found_any = false;
        for model in models {
            if !poll && !self.tickets.has_queued(&model) || !self.may_load(&model) {
                continue;
            }
            match self.tickets.claim(&model, starts) {
                Ok((Some(job), _)) => {
                    self.last_empty_pull = None;
                    self.in_a_row = if self.last_model == model { self.in_a_row + 1 } else { 0 };
                    self.last_model = model;
                    return enqueue_claimed(server, &self.tickets, &job, &self.preview_requests);
                }
                Ok((None, found)) => found_any |= found,
                Err(error) => {
                    tracing::warn!(%error, "can't pull tickets");
                    self.tickets.forget_consumers();
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        }
        self.last_empty_pull = (!found_any).then(Instant::now);
        if !found_any {
            self.tickets.pending.store(0, SeqCst);
        }
    }

    /// Whether to take jobs of this model. If it is not the last job's, only if the workers that have it loaded are
    /// busy for longer than loading it here takes.
    fn may_load(&self, model: &str) -> bool {
        if model == self.last_model || self.last_model.is_empty() {
            return true;
        }
        let nodes = self.tickets.replica.nodes();
        let others =
            nodes.iter().filter(|node| node.worker && !node.draining && node.id != self.tickets.link.id);
        let loaded: Vec<_> =
            others.filter(|node| node.loaded.iter().any(|loaded| loaded.name == model)).collect();
        if loaded.is_empty() {
            return true;
        }
        let state = self.tickets.replica.state();
        let work: f64 =
            state.jobs.values().filter(|job| job.record.model == model).map(|job| job.record.cost).sum();
        let speed: f64 = loaded.iter().map(|node| 1.0 / node.speed.unwrap_or(0.25).max(1e-6)).sum();
        let own = self.load_seconds.get(model).copied();
        let theirs = loaded.iter().flat_map(|node| &node.loaded).filter(|loaded| loaded.name == model);
        let load = own.or_else(|| theirs.map(|loaded| loaded.load_seconds).reduce(f64::max));
        work / speed > load.unwrap_or(LOAD_SECONDS)
    }
}

/// Checks a claimed job again, and queues it here.
fn enqueue_claimed(server: &Server, tickets: &Tickets, job: &JobRecord, preview_requests: &PreviewRequests) {
    if let Err(error) = server.config.limits.check(&job.request, server.catalogue.as_ref()) {
        tracing::error!(
            job = job.id,
            error.code,
            error.message,
            "refusing a job that no gateway would accept"
        );
        let end = JobEnd {
            id: job.id.clone(),
            state: JobState::Failed,
            error: Some((error.code.into(), error.message)),
            notes: Vec::new(),
            finished: now(),
            retry: false,
        };
        return server.record_end(end);
    }
    let mut live = LiveJob::new(job.id.clone(), job.client.clone(), job.request.clone(), Api::Jobs, false);
    live.run_alone = job.is_suspected();
    (live.cost, live.priority, live.created) = (job.cost, job.priority, job.created);
    live.trace = job.trace.as_deref().and_then(TraceContext::parse);
    if lock(preview_requests).remove(&job.id).is_some_and(|since| since.elapsed() < PREVIEW_REQUEST_AGE) {
        live.poll_preview();
    }
    server.enqueue(live);
    // Cancellations from before it was queued here.
    let record = tickets.replica.state().jobs.get(&job.id).map(|known| Arc::clone(&known.record));
    if let (Some(live), Some(record)) = (server.live(&job.id), record) {
        let is_own = record.worker.as_deref() == Some(&tickets.link.id);
        apply_cancellation(server, &live, &record, is_own);
    }
    server.wake_all();
}

/// A message that may be lost: its subject, a number, and its content.
type Outgoing = (String, u32, Bytes);

/// Publishes messages in their order.
async fn publish(link: std::sync::Weak<Link>, mut messages: mpsc::UnboundedReceiver<Outgoing>) {
    while let Some((subject, number, payload)) = messages.recv().await {
        let Some(link) = link.upgrade() else { return };
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("number", number.to_string());
        let _ = link.client.publish_with_headers(subject, headers, payload).await;
    }
}

/// The ledger of a worker: writes the ends of its jobs, and their images.
pub(super) struct WorkerLedger {
    tickets: Arc<Tickets>,
    store: Arc<Store>,
    outbox: mpsc::UnboundedSender<Outgoing>,
    /// The last preview that was sent of each job.
    sent_previews: Mutex<HashMap<String, u32>>,
    server: Mutex<Option<WeakServer>>,
}

/// The error of what only gateways do.
fn unsupported<T>() -> Result<T> {
    Err(StoreError::Queue("a worker accepts no requests".into()))
}

impl Ledger for Arc<WorkerLedger> {
    fn submit(
        &self,
        _: &JobRow,
        _: &LiveJob,
        _: Option<&IdempotencyKey>,
        _: Option<&str>,
    ) -> Result<Option<Option<String>>> {
        unsupported()
    }

    fn start(&self, id: &str) -> Result<()> {
        // The claim was the start. Planning may kill a worker, too.
        self.tickets.set_began(id, true);
        Ok(())
    }

    fn load_failed(&self, reason: &str) {
        let server = lock(&self.server).as_ref().and_then(WeakServer::upgrade);
        let models = server.map(|server| server.catalogue.models()).unwrap_or_default();
        let default = models.into_iter().find(|model| model.default);
        default.into_iter().for_each(|model| self.withdraw(&model.name, reason));
    }

    fn generating(&self, id: &str) {
        self.tickets.set_began(id, false);
    }

    fn undo_start(&self, id: &str) -> Result<()> {
        Ok(self.tickets.give_back(id)?)
    }

    fn finish(&self, end: &JobEnd) -> Result<bool> {
        lock(&self.sent_previews).remove(&end.id);
        if let Some((code, reason)) = &end.error
            && code == "model_failed"
        {
            let known = self.tickets.replica.state().jobs.get(&end.id).map(|job| job.record.model.clone());
            // Before the job is returned, so that it is not claimed here again.
            known.into_iter().for_each(|model| self.withdraw(&model, reason));
        }
        Ok(self.tickets.finish(end)?)
    }

    fn set_order(&self, _: &[String]) -> Result<()> {
        unsupported()
    }

    fn save_image(&self, image: &ImageRow) -> Result<()> {
        let ticket = lock(&self.tickets.held).get(&image.job).map(|held| held.ticket);
        let Some(ticket) = ticket else { return Err(StoreError::Queue("another worker has the job".into())) };
        let record = ImageRecord::new(image, &self.tickets.link.id, ticket.sequence);
        let (link, key) = (Arc::clone(&self.tickets.link), format!("image.{}", image.id));
        self.tickets.link.wait(async move { link.put(&key, &record).await })??;
        Ok(())
    }

    fn delete_images_of(&self, job: &str) -> Result<()> {
        // Another attempt replaces them: its images have the same names.
        let _ = job;
        Ok(())
    }

    fn delete_image(&self, _: &str) -> Result<bool> {
        unsupported()
    }

    fn mark(&self, _: &[String], _: Marks) -> Result<Option<String>> {
        unsupported()
    }

    fn insert_plot(&self, _: &PlotRow) -> Result<()> {
        unsupported()
    }

    fn insert_session(&self, _: &crate::sessions::Session) -> Result<()> {
        unsupported()
    }

    fn delete_session(&self, _: &crate::sessions::Session) -> Result<()> {
        unsupported()
    }

    fn remove_webhook(&self, _: &str) -> Result<()> {
        unsupported()
    }

    fn claim_input(&self, _: &str, _: &str, _: u64, _: u64) -> Result<Claim> {
        unsupported()
    }

    fn touch_input(&self, _: &str, _: &str) -> Result<()> {
        unsupported()
    }

    fn clean_up_occasionally(&self, _: GalleryLimits) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.store.check()?;
        self.tickets.link.check()?;
        let has_models = !lock(&self.tickets.capabilities).models.is_empty();
        let withdrawn = self.tickets.withdrawn.list();
        match withdrawn.into_iter().next().filter(|_| !has_models) {
            Some((model, reason)) => Err(StoreError::Model(format!("{model}: {reason}"))),
            None => Ok(()),
        }
    }

    fn progress(&self, live: &LiveJob) {
        let link = &self.tickets.link;
        self.tickets.in_progress(Some(&live.id));
        let snapshot = live.snapshot();
        let Progress { phase, image, images, step, steps, reused, tile, tiles, fraction } = snapshot.progress;
        let message = ProgressMessage {
            phase: phase.name().to_owned(),
            image,
            images,
            step,
            steps,
            reused,
            tile,
            tiles,
            fraction,
            time_left: snapshot.time_left,
            notes: snapshot.notes,
        };
        let payload = serde_json::to_vec(&message).unwrap_or_default();
        let _ = self.outbox.send((link.subject("progress", &live.id), 0, payload.into()));
        let Some(preview) = snapshot.preview else { return };
        let sent = lock(&self.sent_previews).insert(live.id.clone(), preview.number);
        if sent.is_none_or(|sent| sent < preview.number)
            && let Ok(png) = kiln_image::encode(&preview.image, kiln_image::Format::Png, None)
        {
            let _ = self.outbox.send((link.subject("preview", &live.id), preview.number, png.into()));
        }
    }

    fn claim_batch(&self, first: &LiveJob, room: u32) {
        let Some(server) = lock(&self.server).as_ref().and_then(WeakServer::upgrade) else { return };
        let known = self.tickets.replica.state().jobs.get(&first.id).map(|known| Arc::clone(&known.record));
        let Some(job) = known.filter(|_| room > 0 && !first.run_alone) else { return };
        let jobs = self.tickets.claim_batch(&job.model, &batch_key(&job.request), room);
        jobs.iter().for_each(|job| enqueue_claimed(&server, &self.tickets, job, &Mutex::default()));
    }

    fn metrics(&self, out: &mut String) {
        use std::fmt::Write;

        let held = lock(&self.tickets.held).len();
        let redelivered = self.tickets.redelivered.load(SeqCst);
        let _ = writeln!(
            out,
            "# HELP kiln_jobs_in_flight Claimed jobs.\n# TYPE kiln_jobs_in_flight gauge\nkiln_jobs_in_flight {held}\n\
             # HELP kiln_redeliveries_total Tickets that were delivered again.\n\
             # TYPE kiln_redeliveries_total counter\nkiln_redeliveries_total {redelivered}"
        );
    }
}

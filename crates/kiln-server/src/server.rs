//! The server's state. `queue`, `submit` and `unstarted` hold the operations on its jobs.

mod queue;
mod random;
mod submit;
mod unstarted;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use kiln_base::lock;
use tokio::sync::watch;

pub(crate) use self::queue::GroupEvent;
use self::queue::Queue;
pub(crate) use self::random::{random_bytes, random_seed};
pub(crate) use self::submit::{NewJob, SubmitError};
pub(crate) use self::unstarted::{AttachedJob, stopping_error};
use crate::api::a1111::options::A1111Options;
use crate::auth::Auth;
use crate::body_budget::{BodyBudget, SMALL_BODY};
use crate::config::Config;
use crate::decode_budget::DecodeBudget;
use crate::decoded_cache::DecodedCache;
use crate::downloads::Downloads;
use crate::ends::UnrecordedEnds;
use crate::generator::{Catalogue, LoadedModel};
use crate::keys::{ApiKey, JobRates};
use crate::live::LiveJob;
use crate::metrics::{Metrics, ServerStats};
use crate::store::{Files, Ledger, Local, Store, StoreError};
use crate::traces::Tracer;
use crate::trainings::Trainings;
use crate::webhooks::Webhooks;

/// A handle to the server. Clones share the same state.
#[derive(Clone)]
pub struct Server(Arc<ServerState>);

/// The shared state behind a [`Server`].
pub struct ServerState {
    pub(crate) config: Config,
    /// What is read.
    pub(crate) store: Arc<Store>,
    /// Where everything is written.
    pub(crate) ledger: Box<dyn Ledger>,
    pub(crate) files: Box<dyn Files>,
    pub(crate) metrics: Metrics,
    pub(crate) catalogue: Box<dyn Catalogue>,
    pub(crate) auth: Auth,
    job_rates: JobRates,
    pub(crate) decoded: DecodedCache,
    pub(crate) body_budget: Arc<BodyBudget>,
    pub(crate) decode_budget: DecodeBudget,
    pub(crate) downloads: Downloads,
    /// The trainings, if they are allowed.
    pub(crate) trainings: OnceLock<Trainings>,
    /// Set once no more jobs are accepted.
    pub(crate) closing: watch::Sender<bool>,
    /// Set once open connections must end.
    pub(crate) hang_up: watch::Sender<bool>,
    pub(crate) unrecorded: UnrecordedEnds,
    pub(crate) a1111: A1111Options,
    pub(crate) webhooks: Webhooks,
    pub(crate) tracer: Tracer,
    loaded_models: Mutex<Option<Box<LoadedModels>>>,
    /// When the data folder was last found to be in order.
    storage_checked: Mutex<Option<Instant>>,
    queue: Mutex<Queue>,
    wake: Condvar,
    ready: AtomicBool,
    /// The number of generating threads that wait for a group and were not promised one.
    pub(crate) idle_generators: Arc<AtomicUsize>,
}

/// Tells which models are in memory.
type LoadedModels = dyn Fn() -> Vec<LoadedModel> + Send;

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
        let store = Arc::new(Store::open(&config.folder)?);
        let files = Box::new(Local(Arc::clone(&store)));
        let server = Server::new(config, catalogue, Arc::clone(&store), Box::new(Local(store)), files)?;
        server.resume_unfinished()?;
        for job in server.store.uncalled_webhooks()? {
            server.webhooks.call(&server, &job);
        }
        Ok(server)
    }

    /// A server with no jobs.
    pub(crate) fn new(
        config: Config,
        catalogue: Box<dyn Catalogue>,
        store: Arc<Store>,
        ledger: Box<dyn Ledger>,
        files: Box<dyn Files>,
    ) -> Result<Server, StoreError> {
        Ok(Server(Arc::new(ServerState {
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
            trainings: OnceLock::new(),
            closing: watch::Sender::new(false),
            hang_up: watch::Sender::new(false),
            unrecorded: UnrecordedEnds::default(),
            a1111: A1111Options::default(),
            webhooks: Webhooks::default(),
            tracer: Tracer::new(config.traces.as_ref()),
            loaded_models: Mutex::new(None),
            storage_checked: Mutex::new(None),
            queue: Mutex::default(),
            wake: Condvar::new(),
            ready: AtomicBool::new(false),
            idle_generators: Arc::default(),
            metrics: Metrics::default(),
            config,
            store,
            ledger,
            files,
            catalogue,
        })))
    }

    /// The data folder.
    pub fn folder(&self) -> &std::path::Path {
        &self.config.folder
    }

    pub(crate) fn downgrade(&self) -> WeakServer {
        WeakServer(Arc::downgrade(&self.0))
    }

    /// Replaces the API keys. Sessions of keys that are gone end.
    pub fn set_api_keys(&self, keys: &[ApiKey]) {
        self.auth.set_keys(keys);
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
            models: self.loaded_models(),
        }
    }

    /// The models that are in memory.
    pub(crate) fn loaded_models(&self) -> Vec<LoadedModel> {
        lock(&self.loaded_models).as_ref().map(|loaded| loaded()).unwrap_or_default()
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
        self.ledger.check()?;
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
        if self.ledger.is_gateway() {
            // The jobs go on elsewhere; only those who follow them must connect again.
            let all: Vec<Arc<LiveJob>> = self.queue().live.values().cloned().collect();
            all.iter()
                .filter(|live| !live.attached)
                .for_each(|live| live.change(|s| s.error = Some(stopping_error())));
            self.closing.send_replace(true);
            return;
        }
        for live in waiting {
            if live.attached {
                self.end_unstarted(&live, stopping_error());
            } else {
                live.change(|s| s.error = Some(stopping_error()));
            }
        }
        self.closing.send_replace(true);
        if let Some(trainings) = self.trainings.get() {
            trainings.wake();
        }
    }

    /// Interrupts all active jobs; they resume at the next start.
    pub(crate) fn interrupt(&self) {
        self.active().iter().for_each(|live| live.interrupt());
    }
}

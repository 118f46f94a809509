//! The jobs of this process: the queue of those that have not ended, the database of all, and what they need. The modules
//! know neither HTTP nor fleets; `roles` has the traits that a fleet implements.

pub(crate) mod alone;
mod attempt;
pub(crate) mod attempts;
pub(crate) mod caller;
mod decode_budget;
mod decoded_cache;
pub(crate) mod downloads;
mod ends;
pub(crate) mod error;
mod explained;
pub(crate) mod fair_queue;
pub(crate) mod generator;
pub(crate) mod health;
pub(crate) mod input_images;
pub(crate) mod intake;
pub(crate) mod job;
pub(crate) mod keys;
pub(crate) mod limits;
pub(crate) mod live;
pub(crate) mod metrics;
pub(crate) mod metrics_text;
pub(crate) mod priority;
pub(crate) mod queue;
pub(crate) mod random;
mod resume;
pub(crate) mod roles;
pub(crate) mod sessions;
pub(crate) mod store;
pub(crate) mod traces;
pub(crate) mod trainer;
pub(crate) mod trainings;
mod waiting;
mod work;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_engine::{Embedded, FileRef, Request};
use kiln_filters::ImageCheck;
use kiln_image::{Encoding, RgbImage};
use tokio::sync::watch;

use crate::jobs::decode_budget::DecodeBudget;
use crate::jobs::decoded_cache::DecodedCache;
use crate::jobs::ends::UnrecordedEnds;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::generator::{Catalogue, LoadedModel, name};
use crate::jobs::health::Health;
use crate::jobs::job::Job;
use crate::jobs::limits::Limits;
use crate::jobs::live::LiveJob;
use crate::jobs::metrics::{Metrics, ServerStats};
use crate::jobs::queue::Queue;
use crate::jobs::store::{Files, GalleryLimits, Store, StoreError};
use crate::jobs::traces::{TraceConfig, Tracer};

/// The part of a server's configuration that is about jobs.
#[derive(Clone, Debug)]
pub struct JobsConfig {
    pub(crate) limits: Limits,
    pub(crate) model_aliases: Vec<(String, String)>,
    pub(crate) gallery: GalleryLimits,
    pub(crate) grace: Duration,
    pub(crate) job_timeout: Duration,
    pub(crate) embedded: Embedded,
    pub(crate) check: Option<ImageCheck>,
    pub(crate) traces: Option<TraceConfig>,
}

/// A handle to the jobs. Clones share the same state.
#[derive(Clone)]
pub struct Jobs(Arc<JobsState>);

/// The shared state behind [`Jobs`].
pub struct JobsState {
    pub(crate) config: JobsConfig,
    /// What is read.
    pub(crate) store: Arc<Store>,
    pub(crate) files: Box<dyn Files>,
    pub(crate) health: Box<dyn Health>,
    pub(crate) metrics: Metrics,
    pub(crate) catalogue: Arc<dyn Catalogue>,
    pub(crate) decoded: DecodedCache,
    pub(crate) decode_budget: DecodeBudget,
    /// Set once no more jobs are accepted.
    pub(crate) closing: watch::Sender<bool>,
    pub(crate) unrecorded: UnrecordedEnds,
    pub(crate) tracer: Tracer,
    /// The number of generating threads that wait for a group and were not promised one.
    pub(crate) idle_generators: Arc<AtomicUsize>,
    /// Hears of jobs whose end is recorded.
    on_end: OnceLock<Box<OnEnd>>,
    loaded_models: Mutex<Option<Box<LoadedModels>>>,
    /// When the data folder was last found to be in order.
    storage_checked: Mutex<Option<Instant>>,
    queue: Mutex<Queue>,
    wake: Condvar,
    ready: AtomicBool,
}

/// Tells which models are in memory.
type LoadedModels = dyn Fn() -> Vec<LoadedModel> + Send;
type OnEnd = dyn Fn(&str) + Send + Sync;

/// A handle that doesn't keep the jobs' state alive.
#[derive(Clone)]
pub(crate) struct WeakJobs(Weak<JobsState>);

impl WeakJobs {
    pub(crate) fn upgrade(&self) -> Option<Jobs> {
        self.0.upgrade().map(Jobs)
    }
}

impl std::ops::Deref for Jobs {
    type Target = JobsState;

    fn deref(&self) -> &JobsState {
        &self.0
    }
}

impl Jobs {
    /// Fails if no image could be signed now.
    pub(crate) fn check_signer(&self) -> Result<(), JobError> {
        self.config.embedded.check().map_err(|error| JobError::of_file(&error))
    }

    /// Encodes an image that is no result, such as a preview, as one of this request.
    pub(crate) fn encode_preview(
        &self,
        image: &RgbImage,
        encoding: Encoding,
        request: &Request,
    ) -> kiln_engine::Result<Vec<u8>> {
        let model = request.model.as_deref().map(|model| name(model).to_owned());
        let model = model.or_else(|| self.catalogue.default_model()).unwrap_or_default();
        self.config.embedded.encode_preview(image, encoding, request, &model)
    }

    /// An empty queue.
    pub(crate) fn new(
        config: JobsConfig,
        catalogue: Arc<dyn Catalogue>,
        store: Arc<Store>,
        files: Box<dyn Files>,
        health: Box<dyn Health>,
    ) -> Jobs {
        Jobs(Arc::new(JobsState {
            decoded: DecodedCache::default(),
            decode_budget: DecodeBudget::new(config.limits.all_decoding),
            closing: watch::Sender::new(false),
            unrecorded: UnrecordedEnds::default(),
            tracer: Tracer::new(config.traces.as_ref()),
            on_end: OnceLock::new(),
            loaded_models: Mutex::new(None),
            storage_checked: Mutex::new(None),
            queue: Mutex::default(),
            wake: Condvar::new(),
            ready: AtomicBool::new(false),
            idle_generators: Arc::default(),
            metrics: Metrics::default(),
            config,
            store,
            files,
            health,
            catalogue,
        }))
    }

    pub(crate) fn downgrade(&self) -> WeakJobs {
        WeakJobs(Arc::downgrade(&self.0))
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

    /// Sets who hears of jobs whose end is recorded. The first one counts.
    pub(crate) fn set_on_end(&self, on_end: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.on_end.set(Box::new(on_end));
    }

    /// Tells that the end of a job is recorded.
    pub(crate) fn recorded_end(&self, id: &str) {
        if let Some(on_end) = self.on_end.get() {
            on_end(id);
        }
    }

    pub(crate) fn set_ready(&self) {
        self.ready.store(true, SeqCst);
    }

    /// Whether jobs are processed: the model is loaded and the server is not stopping.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst) && !*self.closing.borrow()
    }

    /// Checks that jobs can be stored; a recent result is used again.
    pub(crate) fn check_storage(&self) -> Result<(), StoreError> {
        const RECENT: Duration = Duration::from_secs(1);
        let mut checked = lock(&self.storage_checked);
        if checked.is_some_and(|at| at.elapsed() < RECENT) {
            return Ok(());
        }
        self.health.check()?;
        *checked = Some(Instant::now());
        Ok(())
    }

    /// Whether the end of a job is still to be recorded.
    pub(crate) fn is_unrecorded(&self, id: &str) -> bool {
        self.unrecorded.get(id).is_some()
    }

    /// The job with this id, as the database will have it.
    pub(crate) fn stored_job(&self, id: &str) -> Result<Option<Job>, StoreError> {
        // Before the row is read: an end that is recorded in between is in the row.
        let end = self.unrecorded.get(id);
        Ok(self.store.job(id)?.map(|row| row.with_end(end)))
    }

    /// The latest jobs of one client or of all, newest first, as the database will have them.
    pub(crate) fn stored_jobs(&self, limit: u32, client: Option<&str>) -> Result<Vec<Job>, StoreError> {
        let mut ends = self.unrecorded.all();
        let rows = self.store.jobs(limit, client)?.into_iter();
        Ok(rows
            .map(|row| {
                let end = ends.remove(&row.id);
                row.with_end(end)
            })
            .collect())
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

    /// Interrupts all active jobs; they resume at the next start.
    pub(crate) fn interrupt(&self) {
        self.active().iter().for_each(|live| live.interrupt());
    }
}

pub(crate) fn stopping_error() -> JobError {
    JobError::new(ErrorCode::ShuttingDown, "the server is stopping")
}

/// A place in the queue that a job of this client takes as long as it is being recorded.
pub(crate) struct Slot {
    jobs: Jobs,
    client: String,
}

impl Slot {
    /// A place that was counted already.
    pub(crate) fn new(jobs: &Jobs, client: &str) -> Slot {
        Slot { jobs: jobs.clone(), client: client.to_owned() }
    }

    /// The job is in the queue and counts for its client itself; the place is nobody's until it is given back.
    pub(crate) fn leave_to_the_job(&mut self, queue: &mut Queue) {
        if let Some(place) = queue.inserting.iter_mut().find(|inserting| **inserting == self.client) {
            place.clear();
            self.client.clear();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut queue = self.jobs.queue();
        if let Some(index) = queue.inserting.iter().position(|inserting| *inserting == self.client) {
            queue.inserting.swap_remove(index);
        }
    }
}

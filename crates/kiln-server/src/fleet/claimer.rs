//! The thread of a worker that claims jobs while there is room for them.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;

use super::tickets::Tickets;
use crate::jobs::Jobs;
use crate::jobs::attempts::{Attempts, WeakAttempts};
use crate::jobs::job::{Job, JobEnd};
use crate::jobs::live::LiveJob;

/// Assumed seconds to load a model that no worker has loaded yet.
const LOAD_SECONDS: f64 = 8.0;
/// How many jobs of one model run in a row before older ones of another.
const MAX_IN_A_ROW: u32 = 8;
/// How long a request for previews is kept that arrives before its job.
pub(super) const PREVIEW_REQUEST_AGE: Duration = Duration::from_secs(10);

/// Jobs whose previews somebody wants, and since when.
pub(super) type PreviewRequests = Mutex<HashMap<String, Instant>>;

/// The thread that claims jobs while there is room for them.
pub(super) struct Claimer {
    tickets: Arc<Tickets>,
    attempts: WeakAttempts,
    preview_requests: Arc<PreviewRequests>,
    /// The model of the last job.
    last_model: String,
    /// How many jobs in a row had that model.
    in_a_row: u32,
    /// How long loading each model took here.
    load_seconds: HashMap<String, f64>,
    /// Jobs that are left to workers that have their models loaded, by model: each one's id, and since when.
    left_to_others: HashMap<String, (String, Instant)>,
    /// When tickets were last pulled without knowing of a queued job.
    polled: Instant,
    /// When the last pull found no ticket; `None` if it found one.
    last_empty_pull: Option<Instant>,
}

impl Claimer {
    pub(super) fn new(
        tickets: &Arc<Tickets>,
        attempts: WeakAttempts,
        requests: &Arc<PreviewRequests>,
    ) -> Claimer {
        Claimer {
            tickets: Arc::clone(tickets),
            attempts,
            preview_requests: Arc::clone(requests),
            last_model: String::new(),
            in_a_row: 0,
            load_seconds: HashMap::new(),
            left_to_others: HashMap::new(),
            polled: Instant::now(),
            last_empty_pull: None,
        }
    }

    pub(super) fn run(mut self) {
        while let Some(attempts) = self.attempts.upgrade() {
            let poll = (self.tickets.link.config.ack_wait / 8).min(Duration::from_millis(500));
            let is_due = self.polled.elapsed() >= poll;
            let may_pull =
                self.last_empty_pull.is_none_or(|since| since.elapsed() > Duration::from_millis(20));
            let mut starts = false;
            let wanted = attempts.wait_for_room(Duration::from_millis(20), |free| {
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
                Some(true) => self.claim(&attempts, is_due, starts),
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
    fn claim(&mut self, attempts: &Attempts, poll: bool, starts: bool) {
        let loaded = attempts.loaded_models().into_iter();
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
                    return enqueue_claimed(attempts, &self.tickets, &job, &self.preview_requests);
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
    /// busy for longer than loading it here takes, or have left its jobs queued for so long: they may lack what these
    /// need, or have failed with them.
    fn may_load(&mut self, model: &str) -> bool {
        if model == self.last_model || self.last_model.is_empty() {
            return true;
        }
        let Some(load_seconds) = self.seconds_that_loading_costs(model) else { return true };
        let Some(next) = self.tickets.next_queued(model) else { return false };
        match self.left_to_others.get(model) {
            Some((id, since)) if *id == next => since.elapsed().as_secs_f64() > load_seconds,
            _ => {
                self.left_to_others.insert(model.to_owned(), (next, Instant::now()));
                false
            }
        }
    }

    /// How long loading a model takes here; `None` if no other worker is sooner ready for its jobs.
    fn seconds_that_loading_costs(&self, model: &str) -> Option<f64> {
        let nodes = self.tickets.replica.nodes();
        let others =
            nodes.iter().filter(|node| node.worker && !node.draining && node.id != self.tickets.link.id);
        let loaded: Vec<_> =
            others.filter(|node| node.loaded.iter().any(|loaded| loaded.name == model)).collect();
        if loaded.is_empty() {
            return None;
        }
        let state = self.tickets.replica.state();
        let work: f64 = state
            .jobs
            .values()
            .filter(|job| job.record.fleet.model == model)
            .map(|job| job.record.cost)
            .sum();
        let speed: f64 = loaded.iter().map(|node| 1.0 / node.speed.unwrap_or(0.25).max(1e-6)).sum();
        let own = self.load_seconds.get(model).copied();
        let theirs = loaded.iter().flat_map(|node| &node.loaded).filter(|loaded| loaded.name == model);
        let load = own.or_else(|| theirs.map(|loaded| loaded.load_seconds).reduce(f64::max));
        let load = load.unwrap_or(LOAD_SECONDS);
        (work / speed <= load).then_some(load)
    }
}

/// Checks a claimed job again, and queues it here.
pub(super) fn enqueue_claimed(
    attempts: &Attempts,
    tickets: &Tickets,
    job: &Job,
    preview_requests: &PreviewRequests,
) {
    if let Err(error) = attempts.config.limits.check(&job.request, attempts.catalogue.as_ref()) {
        tracing::error!(
            job = job.id,
            code = error.code.name(),
            error.message,
            "refusing a job that no gateway would accept"
        );
        return attempts.record_end(JobEnd::unstarted(&job.id, error));
    }
    // Its client waits at the gateway.
    let live = LiveJob::new(Arc::new(Job { attached: false, ..job.clone() }));
    if lock(preview_requests).remove(&job.id).is_some_and(|since| since.elapsed() < PREVIEW_REQUEST_AGE) {
        live.poll_preview();
    }
    if !attempts.push(&Arc::new(live)) {
        // It stops: another worker takes the job at once.
        if let Err(error) = tickets.give_back(&job.id) {
            tracing::warn!(job = job.id, %error, "can't return a job");
        }
        return;
    }
    // Cancellations from before it was queued here.
    let record = tickets.replica.state().jobs.get(&job.id).map(|known| Arc::clone(&known.record));
    if let (Some(live), Some(record)) = (attempts.live(&job.id), record) {
        let is_own = record.fleet.worker.as_deref() == Some(&tickets.link.id);
        apply_cancellation(attempts.jobs(), &live, &record, is_own);
    }
}

/// Cancels a job, or stops it at a preview, if its record says so.
pub(super) fn apply_cancellation(jobs: &Jobs, live: &LiveJob, job: &Job, is_own: bool) {
    if !is_own || job.fleet.cancel || (job.fleet.stop_at_preview && !live.stop_with_preview()) {
        live.cancel();
        jobs.wake_all();
    }
}

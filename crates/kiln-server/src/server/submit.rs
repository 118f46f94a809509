//! Accepts jobs, within the limits of the queue and of their client.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_base::hex;
use kiln_engine::Request;

use super::random::{random_bytes, random_seed};
use super::unstarted::stopping_error;
use crate::Server;
use crate::api::Caller;
use crate::live::{Api, LiveJob};
use crate::priority::Priority;
use crate::store::{IdempotencyKey, JobRow, JobState, StoreError};
use crate::traces::{Span, SpanKind, TraceContext};

/// How long a repeated request waits until the first one is accepted.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(5);

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
    pub(crate) priority: Priority,
}

impl NewJob {
    /// A job that nobody waits for on a connection.
    pub(crate) fn queued(request: Request, caller: Caller, api: Api) -> NewJob {
        NewJob { attached: false, ..NewJob::attached(request, caller, api) }
    }

    /// A job that a client waits for.
    pub(crate) fn attached(request: Request, caller: Caller, api: Api) -> NewJob {
        let priority = Priority::of_caller(&caller);
        NewJob { request, caller, api, attached: true, key: None, webhook: None, priority }
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

impl Server {
    /// Accepts a job.
    pub(crate) fn submit(&self, new: NewJob) -> Result<Arc<LiveJob>, SubmitError> {
        let NewJob { mut request, caller, api, attached, key, webhook, priority } = new;
        let client = caller.client.clone();
        let started = Instant::now();
        // Choose the seed now, so that a retry generates the same image.
        if request.seed.is_empty() {
            request.seed = vec![random_seed()];
        }
        // Fill in the defaults: clients see the effective format.
        request.output_format.get_or_insert_default();
        request.png.get_or_insert_default();
        let is_gateway = self.ledger.is_gateway();
        let id = match &key {
            Some(key) if is_gateway => key.job_id(),
            _ => hex(random_bytes::<12>()),
        };
        let mut live = LiveJob::new(id, client.clone(), request, api, attached);
        (live.cost, live.priority) = (self.cost(&live.request), priority);
        live.trace =
            self.tracer.is_on().then(|| caller.trace.map_or_else(TraceContext::new, TraceContext::child));
        live.fingerprint = key.as_ref().map(|key| key.fingerprint.clone());
        let live = Arc::new(live);
        let queued = self.queued_job(&live);
        let row = JobRow {
            id: live.id.clone(),
            client: live.client.clone(),
            attached,
            priority,
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
        if is_gateway {
            // Before it is submitted: a worker may be done with it before this goes on.
            let earlier = self.queue().live.insert_new(&live);
            if let Some(earlier) = earlier {
                self.release_slot(&client);
                if !self.is_accepted(&live.id).map_err(SubmitError::Store)? {
                    let reason = "an earlier request with this key was not accepted; try again";
                    return Err(SubmitError::Store(StoreError::Queue(reason.into())));
                }
                let same = earlier.fingerprint == live.fingerprint;
                return Err(SubmitError::Repeated(same.then(|| live.id.clone())));
            }
        }
        // Not under the lock: the generating thread takes it too and must not wait for the disk.
        let inserted = self.ledger.submit(&row, &live, key.as_ref(), webhook.as_deref());
        if is_gateway {
            self.release_slot(&client);
            let failed = match inserted {
                Ok(None) => {
                    self.trace_submission(&live, caller.trace, started);
                    tracing::info!(job = live.id, client = live.client, "job queued");
                    return Ok(live);
                }
                Ok(Some(earlier)) => SubmitError::Repeated(earlier),
                Err(error) => SubmitError::Store(error),
            };
            self.remove_unsubmitted(&live);
            return Err(failed);
        }
        {
            self.release_slot(&client);
            let mut queue = self.queue();
            if let Some(earlier) = inserted.map_err(SubmitError::Store)? {
                return Err(SubmitError::Repeated(earlier));
            }
            if !queue.stopping {
                queue.push(queued, Arc::clone(&live));
                drop(queue);
                self.wake.notify_all();
                self.trace_submission(&live, caller.trace, started);
                // Inside the request's span: the log links the request's id with the job's.
                tracing::info!(job = live.id, client = live.client, "job queued");
                return Ok(live);
            }
        }
        self.end_unstarted(&live, stopping_error());
        Err(SubmitError::Stopping)
    }

    /// Whether a job is stored that another request submits just now; waits for that. Blocks.
    fn is_accepted(&self, id: &str) -> Result<bool, StoreError> {
        let until = Instant::now() + ACCEPT_TIMEOUT;
        loop {
            if self.store.job(id)?.is_some() {
                return Ok(true);
            }
            if self.live(id).is_none() || Instant::now() > until {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn trace_submission(&self, live: &LiveJob, parent: Option<TraceContext>, started: Instant) {
        let Some(context) = live.trace else { return };
        let attributes = vec![("kiln.job", live.id.clone()), ("kiln.client", live.client.clone())];
        let kind = SpanKind::Producer;
        self.tracer.send(Span { name: "submit", kind, context, parent, started, attributes, error: None });
    }

    /// Gives back a reserved place.
    fn release_slot(&self, client: &str) {
        let mut queue = self.queue();
        if let Some(index) = queue.inserting.iter().position(|inserting| inserting == client) {
            queue.inserting.swap_remove(index);
        }
    }

    /// Forgets a job that was not submitted after all.
    fn remove_unsubmitted(&self, live: &Arc<LiveJob>) {
        let mut queue = self.queue();
        if queue.live.get(&live.id).is_some_and(|known| Arc::ptr_eq(known, live)) {
            queue.live.remove(&live.id);
        }
    }

    /// Reserves a place in the queue for a job of this client.
    fn reserve_slot(&self, caller: &Caller) -> Result<(), SubmitError> {
        let capacity = self.config.limits.queue;
        let (client, quotas) = (caller.client.as_str(), caller.quotas);
        // Besides the running one, a client may fill at most half of the queue.
        let max_jobs = quotas.jobs.map_or(capacity / 2 + 1, NonZeroUsize::get);
        let mut queue = self.queue();
        if queue.stopping {
            return Err(SubmitError::Stopping);
        }
        let inserting = queue.inserting.iter().filter(|other| *other == client).count();
        let client_limit = queue.live.of_client(client) + inserting >= max_jobs;
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
}

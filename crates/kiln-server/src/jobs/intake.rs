//! Takes jobs in, within the limits of the queue and of their client. `input_images` stores the images they bring.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use kiln_engine::Request;

use crate::jobs::caller::Caller;
use crate::jobs::job::{Api, Job};
use crate::jobs::keys::JobRates;
use crate::jobs::live::LiveJob;
use crate::jobs::priority::Priority;
use crate::jobs::random::random_seed;
use crate::jobs::roles::{Keeping, SubmitError, Submitting};
use crate::jobs::store::{IdempotencyKey, StoreError, now};
use crate::jobs::traces::{Span, SpanKind, TraceContext};
use crate::jobs::{Jobs, Slot};

/// The jobs, and where those of clients go. Clones share the same state.
#[derive(Clone)]
pub struct Intake {
    jobs: Jobs,
    pub(crate) submitting: Arc<dyn Submitting>,
    pub(crate) keeping: Arc<dyn Keeping>,
    rates: Arc<JobRates>,
}

impl std::ops::Deref for Intake {
    type Target = Jobs;

    fn deref(&self) -> &Jobs {
        &self.jobs
    }
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
    pub(crate) priority: Priority,
}

impl NewJob {
    /// A job that nobody waits for on a connection.
    pub(crate) fn queued(request: Request, caller: Caller, api: Api) -> NewJob {
        NewJob { attached: false, ..NewJob::attached(request, caller, api) }
    }

    /// A job that a client waits for.
    pub(crate) fn attached(request: Request, caller: Caller, api: Api) -> NewJob {
        let priority = caller.quotas.usual_priority();
        NewJob { request, caller, api, attached: true, key: None, webhook: None, priority }
    }
}

impl Intake {
    pub(crate) fn new(jobs: Jobs, submitting: Arc<dyn Submitting>, keeping: Arc<dyn Keeping>) -> Intake {
        Intake { jobs, submitting, keeping, rates: Arc::default() }
    }

    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// Accepts a job.
    pub(crate) fn submit(&self, new: NewJob) -> Result<Arc<LiveJob>, SubmitError> {
        let NewJob { mut request, caller, api, attached, key, webhook, priority } = new;
        let started = Instant::now();
        // Choose the seed now, so that a retry generates the same image.
        if request.seed.is_empty() {
            request.seed = vec![random_seed()];
        }
        // Fill in the defaults: clients see the effective format.
        request.output_format.get_or_insert_default();
        request.png.get_or_insert_default();
        let id = self.submitting.new_id(key.as_ref());
        let new_trace = || caller.trace.map_or_else(TraceContext::new, TraceContext::child);
        let live = Arc::new(LiveJob::new(Arc::new(Job {
            id,
            client: caller.client.clone(),
            attached,
            api,
            cost: self.cost(&request),
            request,
            priority,
            created: now(),
            key: key.map(|key| (key.key, key.fingerprint)),
            webhook,
            trace: self.tracer.is_on().then(new_trace),
            ..Job::default()
        })));
        self.check_signer().map_err(SubmitError::Refused)?;
        let place = self.reserve_slot(&caller)?;
        self.submitting.submit(&live, place)?;
        self.trace_submission(&live, caller.trace, started);
        // Inside the request's span: the log links the request's id with the job's.
        tracing::info!(job = live.id, client = live.client, "job queued");
        Ok(live)
    }

    /// Cancels a job; see [`Submitting::cancel`].
    pub(crate) fn cancel(&self, id: &str) -> bool {
        self.submitting.cancel(id)
    }

    /// Cancels a job; see [`Submitting::cancel_now`].
    pub(crate) fn cancel_now(&self, id: &str) -> Result<bool, StoreError> {
        self.submitting.cancel_now(id)
    }

    /// Gives waiting jobs of a client their places in this order.
    pub(crate) fn reorder(&self, client: &str, order: &[String]) -> Result<(), StoreError> {
        self.submitting.reorder(client, order)
    }

    fn trace_submission(&self, live: &LiveJob, parent: Option<TraceContext>, started: Instant) {
        let Some(context) = live.trace else { return };
        let attributes = vec![("kiln.job", live.id.clone()), ("kiln.client", live.client.clone())];
        let kind = SpanKind::Producer;
        self.tracer.send(Span { name: "submit", kind, context, parent, started, attributes, error: None });
    }

    /// Reserves a place in the queue for a job of this client.
    fn reserve_slot(&self, caller: &Caller) -> Result<Slot, SubmitError> {
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
            self.rates.take(client, per_minute).map_err(limited)?;
        }
        queue.inserting.push(client.to_owned());
        drop(queue);
        Ok(Slot::new(&self.jobs, client))
    }
}

/// A job that a client waits for; dropping this cancels it.
pub(crate) struct AttachedJob {
    intake: Intake,
    pub(crate) live: Arc<LiveJob>,
}

impl AttachedJob {
    pub(crate) fn new(intake: &Intake, live: Arc<LiveJob>) -> AttachedJob {
        AttachedJob { intake: intake.clone(), live }
    }
}

impl Drop for AttachedJob {
    fn drop(&mut self) {
        if !self.live.state().is_final() {
            tracing::info!(job = self.live.id, "client disconnected, cancelling its job");
            self.intake.cancel(&self.live.id);
        }
    }
}

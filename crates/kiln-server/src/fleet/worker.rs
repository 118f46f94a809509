//! A worker: a server without an API, whose queue holds the jobs that it has claimed.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use async_nats::jetstream::kv::Entry;
use futures_util::StreamExt;
use kiln_base::lock;

use super::announce::Announcer;
use super::claimer::{Claimer, PREVIEW_REQUEST_AGE, PreviewRequests, apply_cancellation};
use super::config::FleetConfig;
use super::error::FleetError;
use super::link::Link;
use super::lora_previews;
use super::messages::{Outbox, publish};
use super::objects::Objects;
use super::replica::{Follower, Replica};
use super::tickets::Tickets;
use super::worker_ledger::{WorkerHealth, WorkerLedger};
use crate::Config;
use crate::http::api::caller::Gate;
use crate::http::api::router::probes;
use crate::http::auth::Auth;
use crate::http::listen::{finish_jobs, serve_app};
use crate::jobs::attempts::Attempts;
use crate::jobs::generator::{Catalogue, Generator};
use crate::jobs::job::Job;
use crate::jobs::roles::Shutdown;
use crate::jobs::store::Store;
use crate::jobs::{Jobs, WeakJobs};

/// A worker of a fleet.
pub struct FleetWorker {
    config: Arc<Config>,
    attempts: Attempts,
    tickets: Arc<Tickets>,
    claiming: Mutex<Option<JoinHandle<()>>>,
}

/// Connects a worker to the queue. `config` has a folder for temporary files, and the limits that requests must keep.
pub fn open_worker(
    config: Config,
    fleet: FleetConfig,
    catalogue: Arc<dyn Catalogue>,
) -> std::result::Result<FleetWorker, FleetError> {
    let link = Link::open(fleet)?;
    let store = Store::open(&config.folder).map_err(|error| FleetError(error.to_string()))?;
    let store = Arc::new(store);
    let replica = Replica::new(&link);
    let tickets = Arc::new(Tickets::new(&link, &replica));
    let outbox = Arc::new(Outbox::default());
    let preview_requests = Arc::new(Mutex::default());
    let files = Box::new(Objects::open(&link, &store)?);
    let health = Box::new(WorkerHealth { tickets: Arc::clone(&tickets), store: Arc::clone(&store) });
    let jobs = Jobs::new(config.of_jobs(), catalogue, store, files, health);
    tickets.set_jobs(jobs.downgrade());
    let ledger = Arc::new(WorkerLedger::new(&tickets, &outbox));
    let attempts = Attempts::new(jobs, Box::new(Arc::clone(&ledger)));
    ledger.set_attempts(attempts.downgrade());
    link.handle().spawn(publish(Arc::downgrade(&link), outbox));
    let worker = FleetWorker { config: Arc::new(config), attempts, tickets, claiming: Mutex::default() };
    worker.follow(&replica, &preview_requests);
    let caught_up = replica.catch_up(&link);
    caught_up?;
    worker
        .start_threads(&preview_requests)
        .map_err(|error| FleetError(format!("can't start threads: {error}")))?;
    Ok(worker)
}

impl FleetWorker {
    /// The folder of temporary files.
    pub fn folder(&self) -> &Path {
        &self.config.folder
    }

    /// Takes no more jobs, and reports so to probes.
    pub fn close(&self) {
        self.attempts.close();
    }

    /// [`FleetWorker::close`] for another thread.
    pub fn closer(&self) -> impl FnOnce() + Send + 'static {
        let attempts = self.attempts.clone();
        move || attempts.close()
    }

    /// Generates with these; the returned thread ends after [`FleetWorker::serve`].
    pub fn generate_with_all<G: Generator>(
        &self,
        generators: Vec<G>,
    ) -> std::io::Result<std::thread::JoinHandle<()>> {
        self.attempts.generate_with_all(generators)
    }

    /// Serves the probes and the metrics until `stop` completes, then drains.
    pub async fn serve(&self, listener: Option<tokio::net::TcpListener>, stop: impl Future<Output = ()>) {
        match listener {
            Some(listener) => {
                let auth = Auth::new(&self.config.api_keys, Vec::new(), self.config.wrong_key_delay);
                let (config, jobs) = (Arc::clone(&self.config), self.attempts.jobs().clone());
                let app = probes(Gate { config, auth: Arc::new(auth), jobs });
                serve_app(&self.config, self.attempts.jobs(), &self.attempts, app, listener, stop).await;
            }
            None => {
                stop.await;
                self.close();
                finish_jobs(self.attempts.jobs(), &self.attempts).await;
            }
        }
    }

    /// Takes no more jobs, returns those that are still held to the queue, and deletes the worker's record. Blocks.
    pub fn leave(self) {
        self.close();
        self.wait_for_claims();
        let held: Vec<String> = lock(&self.tickets.held).keys().cloned().collect();
        for id in held {
            if let Err(error) = self.tickets.give_back(&id) {
                tracing::warn!(job = id, %error, "could not return a job; it goes to another worker after a while");
            }
        }
        let link = &self.tickets.link;
        let _ = link.wait(link.delete(&format!("node.{}", link.id)));
    }

    /// Waits until nothing more is claimed; not for servers that don't answer.
    fn wait_for_claims(&self) {
        const LIMIT: Duration = Duration::from_secs(3);
        let (claiming, started) = (lock(&self.claiming).take(), Instant::now());
        while claiming.as_ref().is_some_and(|claiming| !claiming.is_finished()) && started.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Follows the records: jobs that are cancelled or taken over by another worker, and new ones.
    fn follow(&self, replica: &Arc<Replica>, preview_requests: &Arc<PreviewRequests>) {
        let link = &self.tickets.link;
        let follower =
            HeldJobs { tickets: Arc::clone(&self.tickets), jobs: self.attempts.jobs().downgrade() };
        link.handle().spawn(Arc::clone(replica).follow(Arc::downgrade(link), follower));
        link.handle().spawn(lora_previews::answer(
            link.client.clone(),
            link.subject("lora", "preview"),
            self.attempts.jobs().downgrade(),
        ));
        let (subject, client) = (link.subject("watch", "*"), link.client.clone());
        let (jobs, preview_requests) = (self.attempts.jobs().downgrade(), Arc::clone(preview_requests));
        link.handle().spawn(async move {
            let Ok(mut wanted) = client.subscribe(subject).await else { return };
            while let Some(message) = wanted.next().await {
                let Some(id) = message.subject.rsplit('.').next() else { continue };
                let Some(jobs) = jobs.upgrade() else { return };
                match jobs.live(id) {
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
        let jobs = self.attempts.jobs().downgrade();
        self.tickets.update_capabilities(&self.attempts);
        let tickets = Arc::downgrade(&self.tickets);
        let mut announcer = Announcer::new(&self.tickets.link, true)
            .leave_out(move || tickets.upgrade().map(|tickets| tickets.withdrawn.list()).unwrap_or_default());
        announcer.announce(&self.attempts);
        thread("announcing").spawn(move || announcer.run(&jobs, |_| {}))?;
        let (tickets, jobs) = (Arc::downgrade(&self.tickets), self.attempts.jobs().downgrade());
        let pause = self.tickets.link.config.ack_wait / 3;
        let mut unheld = HashMap::new();
        thread("in progress").spawn(move || {
            while let (Some(tickets), Some(jobs)) = (tickets.upgrade(), jobs.upgrade()) {
                tickets.in_progress(None);
                if let Err(error) = tickets.return_unheld(&mut unheld) {
                    tracing::warn!(%error, "can't return a job");
                }
                tickets.update_capabilities(&jobs);
                drop((tickets, jobs));
                std::thread::sleep(pause);
            }
        })?;
        let claimer = Claimer::new(&self.tickets, self.attempts.downgrade(), preview_requests);
        *lock(&self.claiming) = Some(thread("claiming").spawn(move || claimer.run())?);
        Ok(())
    }
}

/// Watches the records of the jobs that this worker holds.
struct HeldJobs {
    tickets: Arc<Tickets>,
    jobs: WeakJobs,
}

impl Follower for HeldJobs {
    fn before(&self, entry: &Entry) {
        let Some(id) = entry.key.strip_prefix("job.") else { return };
        let held = lock(&self.tickets.held).get(id).filter(|held| !held.leaving).map(|held| held.ticket);
        let Some(held) = held else { return };
        let Some(jobs) = self.jobs.upgrade() else { return };
        let record = serde_json::from_slice::<Job>(&entry.value).ok();
        let own = &self.tickets.link.id;
        let is_own = record
            .as_ref()
            .is_some_and(|job| job.fleet.worker.as_ref() == Some(own) && job.ticket_id() == Some(held));
        if !is_own {
            tracing::warn!(job = id, "another worker has taken over a job");
            lock(&self.tickets.held).remove(id);
        }
        if let (Some(live), Some(job)) = (jobs.live(id), record) {
            apply_cancellation(&jobs, &live, &job, is_own);
        }
    }

    fn after(&self) {
        if let Some(jobs) = self.jobs.upgrade() {
            jobs.wake_all();
        }
    }

    fn lost(&self, _: &[String]) {
        let held = std::mem::take(&mut *lock(&self.tickets.held));
        let Some(jobs) = self.jobs.upgrade() else { return };
        held.keys().filter_map(|id| jobs.live(id)).for_each(|live| live.cancel());
        jobs.wake_all();
    }
}

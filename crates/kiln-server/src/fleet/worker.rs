//! A worker: a server without an API, whose queue holds the jobs that it has claimed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

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
use super::records::JobRecord;
use super::replica::{Follower, Replica};
use super::tickets::Tickets;
use super::worker_ledger::WorkerLedger;
use crate::api::probes;
use crate::generator::{Catalogue, Generator};
use crate::server::WeakServer;
use crate::store::Store;
use crate::{Config, Server};

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
    let outbox = Arc::new(Outbox::default());
    let preview_requests = Arc::new(Mutex::default());
    let ledger = WorkerLedger::new(&tickets, &store, &outbox);
    let ledger = Arc::new(ledger);
    let files = Box::new(Objects::open(&link, &store)?);
    let server = Server::new(config, catalogue, store, Box::new(Arc::clone(&ledger)), files)
        .map_err(|error| FleetError(error.to_string()))?;
    ledger.set_server(server.downgrade());
    link.handle().spawn(publish(Arc::downgrade(&link), outbox));
    let worker = FleetWorker { server, tickets };
    worker.follow(&replica, &preview_requests);
    let caught_up = replica.catch_up(&link);
    caught_up?;
    worker
        .start_threads(&preview_requests)
        .map_err(|error| FleetError(format!("can't start threads: {error}")))?;
    Ok(worker)
}

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
        let claimer = Claimer::new(&self.tickets, self.server.downgrade(), preview_requests);
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

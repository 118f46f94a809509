//! What a worker writes: the ends of its jobs, and their images.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

use kiln_base::lock;

use super::claimer::enqueue_claimed;
use super::messages::{Outbox, Outgoing, ProgressMessage};
use super::records::ImageRecord;
use super::tickets::Tickets;
use crate::jobs::attempts::WeakAttempts;
use crate::jobs::error::ErrorCode;
use crate::jobs::health::Health;
use crate::jobs::job::JobEnd;
use crate::jobs::live::{JobSnapshot, LiveJob};
use crate::jobs::metrics_text::MetricsText;
use crate::jobs::roles::Attempting;
use crate::jobs::store::{ImageRow, Store, StoreError};

type Result<T> = std::result::Result<T, StoreError>;

/// The ledger of a worker: writes the ends of its jobs, and their images.
pub(super) struct WorkerLedger {
    tickets: Arc<Tickets>,
    outbox: Arc<Outbox>,
    /// The last preview that was sent of each job.
    sent_previews: Mutex<HashMap<String, u32>>,
    attempts: Mutex<Option<WeakAttempts>>,
}

impl WorkerLedger {
    pub(super) fn new(tickets: &Arc<Tickets>, outbox: &Arc<Outbox>) -> WorkerLedger {
        WorkerLedger {
            tickets: Arc::clone(tickets),
            outbox: Arc::clone(outbox),
            sent_previews: Mutex::default(),
            attempts: Mutex::new(None),
        }
    }

    pub(super) fn set_attempts(&self, attempts: WeakAttempts) {
        *lock(&self.attempts) = Some(attempts);
    }

    /// Takes no more jobs of a model that can't be loaded.
    fn withdraw(&self, model: &str, reason: &str) {
        self.tickets.withdrawn.insert(model, reason);
        if let Some(attempts) = lock(&self.attempts).as_ref().and_then(WeakAttempts::upgrade) {
            self.tickets.update_capabilities(&attempts);
        }
    }
}

impl Attempting for Arc<WorkerLedger> {
    fn start(&self, id: &str) -> Result<()> {
        // The claim was the start. Planning may kill a worker, too.
        self.tickets.set_began(id, true);
        Ok(())
    }

    fn load_failed(&self, reason: &str) {
        let attempts = lock(&self.attempts).as_ref().and_then(WeakAttempts::upgrade);
        if let Some(model) = attempts.and_then(|attempts| attempts.catalogue.default_model()) {
            self.withdraw(&model, reason);
        }
    }

    fn generating(&self, id: &str) {
        self.tickets.set_began(id, false);
    }

    fn undo_start(&self, id: &str) -> Result<()> {
        Ok(self.tickets.give_back(id)?)
    }

    /// Other workers take them, while this one ends what it runs.
    fn abandon(&self, ids: Vec<String>) {
        if ids.is_empty() {
            return;
        }
        let ledger = Arc::clone(self);
        let give_back = move || {
            for id in ids {
                if let Err(error) = ledger.tickets.give_back(&id) {
                    tracing::warn!(job = id, %error, "can't return a job");
                }
            }
        };
        // Without the thread they are returned at the end.
        let _ = std::thread::Builder::new().name("returning".into()).spawn(give_back);
    }

    fn finish(&self, end: &JobEnd) -> Result<bool> {
        lock(&self.sent_previews).remove(&end.id);
        if let Some(error) = end.error.as_ref().filter(|error| error.code == ErrorCode::ModelFailed) {
            let known =
                self.tickets.replica.state().jobs.get(&end.id).map(|job| job.record.fleet.model.clone());
            // Before the job is returned, so that it is not claimed here again.
            known.into_iter().for_each(|model| self.withdraw(&model, &error.message));
        }
        Ok(self.tickets.finish(end)?)
    }

    fn save_image(&self, image: &ImageRow) -> Result<()> {
        let ticket = lock(&self.tickets.held).get(&image.job).map(|held| held.ticket);
        let Some(ticket) = ticket else { return Err(StoreError::Queue("another worker has the job".into())) };
        let link = &self.tickets.link;
        let record = ImageRecord { row: image.clone(), worker: link.id.clone(), ticket: ticket.sequence };
        link.wait(link.put(&format!("image.{}", image.id), &record))?;
        Ok(())
    }

    fn progress(&self, live: &LiveJob) {
        let link = &self.tickets.link;
        self.tickets.in_progress(Some(&live.id));
        let JobSnapshot { progress, time_left, notes, preview, .. } = live.snapshot();
        let message = ProgressMessage { progress, time_left, notes };
        let payload = serde_json::to_vec(&message).unwrap_or_default();
        let subject = link.subject("progress", &live.id);
        self.outbox.send(Outgoing { subject, number: 0, payload: payload.into() });
        let Some(preview) = preview else { return };
        let sent = lock(&self.sent_previews).insert(live.id.clone(), preview.number);
        if sent != Some(preview.number)
            && let Ok(png) = kiln_image::encode(&preview.image, kiln_image::Format::Png, None)
        {
            let subject = link.subject("preview", &live.id);
            self.outbox.send(Outgoing { subject, number: preview.number, payload: png.into() });
        }
    }

    fn claim_batch(&self, first: &LiveJob, room: u32) {
        let Some(attempts) = lock(&self.attempts).as_ref().and_then(WeakAttempts::upgrade) else { return };
        let known = self.tickets.replica.state().jobs.get(&first.id).map(|known| Arc::clone(&known.record));
        let Some(job) = known.filter(|_| room > 0) else { return };
        let Some(key) = first.batch_key() else { return };
        let jobs = self.tickets.claim_batch(&job.fleet.model, key, room);
        jobs.iter().for_each(|job| enqueue_claimed(&attempts, &self.tickets, job, &Mutex::default()));
    }
}

/// Whether a worker can store images, reach the queue and load a model.
pub(super) struct WorkerHealth {
    pub(super) tickets: Arc<Tickets>,
    pub(super) store: Arc<Store>,
}

impl Health for WorkerHealth {
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

    fn metrics(&self, out: &mut MetricsText) {
        out.gauge("kiln_jobs_in_flight", "Claimed jobs.", lock(&self.tickets.held).len());
        let redelivered = self.tickets.redelivered.load(SeqCst);
        out.counter("kiln_redeliveries_total", "Tickets that were delivered again.", redelivered);
    }
}

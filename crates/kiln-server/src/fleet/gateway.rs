//! A gateway: a server that writes accepted jobs to the queue and reads from a replica of the queue's records.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{SystemTime, UNIX_EPOCH};

use kiln_base::hex;
use serde::Serialize;

use super::announce::Announcer;
use super::bucket::WriteOutcome;
use super::catalogue::FleetCatalogue;
use super::changes::{cancel, change_job};
use super::config::FleetConfig;
use super::error::FleetError;
use super::housekeeping::Housekeeper;
use super::link::Link;
use super::mirror;
use super::objects::Objects;
use super::reconcile::Reconciler;
use super::records::{InputRecord, JobRecord, MarkRecord};
use super::replica::Replica;
use crate::live::LiveJob;
use crate::server::random_bytes;
use crate::sessions::Session;
use crate::store::{
    Claim, FileKind, Files, GalleryLimits, IdempotencyKey, ImageRow, InputFiles, JobEnd, JobRow, JobState,
    Ledger, Marks, PlotRow, Store, StoreError, now,
};
use crate::{Config, Server};

type Result<T> = std::result::Result<T, StoreError>;

/// Opens a gateway. The folder of `config` holds the replica; one of an earlier process is deleted.
pub fn open_gateway(config: Config, fleet: FleetConfig) -> std::result::Result<Server, FleetError> {
    let link = Link::open(fleet)?;
    clear(&config.folder);
    let store = Store::open(&config.folder).map_err(|error| FleetError(error.to_string()))?;
    store.skip_syncs().map_err(|error| FleetError(error.to_string()))?;
    let store = Arc::new(store);
    let files = Objects::open(&link, &store)?;
    let replica = Replica::new(&link);
    let catalogue = Arc::new(FleetCatalogue::new(&link, &replica));
    let ledger = GatewayLedger {
        link: Arc::clone(&link),
        replica: Arc::clone(&replica),
        store: Arc::clone(&store),
        files: files.clone(),
        catalogue: Arc::clone(&catalogue),
        clock: SubmissionClock::default(),
    };
    let (catalogue_of, ledger) = (Box::new(Arc::clone(&catalogue)), Box::new(ledger));
    let server = Server::new(config, catalogue_of, store, ledger, Box::new(files.clone()))
        .map_err(|error| FleetError(error.to_string()))?;
    mirror::start(&server, &link, &replica, &catalogue);
    replica.catch_up(&link)?;
    let weak = server.downgrade();
    let mut housekeeper = Housekeeper::new(&link, &replica, &files.stored);
    std::thread::Builder::new()
        .name("announcing".into())
        .spawn({
            let link = Arc::clone(&link);
            move || Announcer::new(&link, false).run(&weak, |server| housekeeper.work(server))
        })
        .map_err(|error| FleetError(format!("can't start threads: {error}")))?;
    let (weak, reconciler) = (server.downgrade(), Reconciler::new(&link, &replica));
    std::thread::Builder::new()
        .name("reconciling".into())
        .spawn(move || reconciler.run(|| weak.upgrade().is_some()))
        .map_err(|error| FleetError(format!("can't start threads: {error}")))?;
    link.hurry();
    server.set_ready();
    Ok(server)
}

/// Deletes the replica of an earlier process.
fn clear(folder: &Path) {
    for file in ["queue.sqlite", "queue.sqlite-wal", "queue.sqlite-shm"] {
        let _ = std::fs::remove_file(folder.join(file));
    }
}

/// Writes to the queue.
struct GatewayLedger {
    link: Arc<Link>,
    replica: Arc<Replica>,
    store: Arc<Store>,
    files: Objects,
    catalogue: Arc<FleetCatalogue>,
    clock: SubmissionClock,
}

/// Numbers the submissions of a gateway: by the microsecond, never twice the same, and apart from other gateways'.
#[derive(Default)]
pub(super) struct SubmissionClock(AtomicU64);

impl SubmissionClock {
    fn next(&self, gateway: &str) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let last = self.0.fetch_update(SeqCst, SeqCst, |last| Some(now.max(last + 1)));
        let time = last.map_or(now, |last| now.max(last + 1));
        let own = gateway.bytes().fold(0, |hash: u64, byte| hash.wrapping_mul(31) + u64::from(byte));
        // 51 bits of time and 10 of the gateway: fits into the database's numbers.
        (time << 10) | (own % 1024)
    }
}

impl GatewayLedger {
    /// Writes a record and waits until the replica has it.
    fn put(&self, key: String, value: impl Serialize + Send + Sync + 'static) -> Result<()> {
        let link = Arc::clone(&self.link);
        let revision = self.link.wait(async move { link.put(&key, &value).await })??;
        Ok(self.replica.wait_for(revision)?)
    }

    fn delete(&self, key: String) -> Result<()> {
        let link = Arc::clone(&self.link);
        self.link.wait(async move { link.delete(&key).await })??;
        Ok(self.replica.catch_up(&self.link)?)
    }

    /// Changes the record of a job; retries after a conflict. `change` returns false to leave the record as it is.
    fn change(&self, id: &str, change: impl Fn(&mut JobRecord) -> bool + Send + 'static) -> Result<()> {
        let (link, id) = (Arc::clone(&self.link), id.to_owned());
        let revision = self.link.wait(async move { change_job(&link, &id, change).await })??;
        Ok(self.replica.wait_for(revision.unwrap_or(0))?)
    }
}

impl Ledger for GatewayLedger {
    fn is_gateway(&self) -> bool {
        true
    }

    fn submit(
        &self,
        job: &JobRow,
        live: &LiveJob,
        key: Option<&IdempotencyKey>,
        webhook: Option<&str>,
    ) -> Result<Option<Option<String>>> {
        let mut record = JobRecord::new(job, live, key, webhook, &self.link.id);
        (record.model, record.hash) = self.catalogue.model_of(&job.request);
        if record.model.is_empty() {
            return Err(StoreError::Queue("no worker has announced a model yet".into()));
        }
        record.sequence = self.clock.next(&self.link.id);
        record.submission = hex(random_bytes::<8>());
        mirror::connect(live, &self.link);
        let link = Arc::clone(&self.link);
        let submitted = self.link.wait(async move {
            let name = JobRecord::record_key(&record.id);
            // The job is accepted once its record is there. Only its gateway creates it: whoever finds another one has
            // repeated a request.
            let revision = match link.create(&name, &record).await? {
                WriteOutcome::Revision(revision) => revision,
                WriteOutcome::Conflict => {
                    let missing = || FleetError("the record disappeared after it was created".into());
                    let entry = link.entry(&name).await?.ok_or_else(missing)?;
                    let stored = serde_json::from_slice::<JobRecord>(&entry.value);
                    let stored = stored.map_err(|error| FleetError(format!("the record {name}: {error}")))?;
                    if stored.submission != record.submission {
                        return Ok(Err((entry.revision, stored)));
                    }
                    // Its own: the answer was lost, and a worker may have claimed it since.
                    entry.revision
                }
            };
            let publishing = Arc::clone(&link);
            link.handle().spawn(async move {
                if let Err(error) = publishing.publish_ticket(&record, &record.submission).await {
                    tracing::warn!(job = record.id, %error, "no ticket yet: the reconciler publishes it");
                }
            });
            Ok::<_, FleetError>(Ok(revision))
        })??;
        match submitted {
            Ok(revision) => {
                // Accepted in any case; clients may see it a little later.
                if let Err(error) = self.replica.wait_for(revision) {
                    tracing::warn!(job = live.id, %error, "an accepted job is not known here yet");
                }
                Ok(None)
            }
            Err((revision, earlier)) => {
                self.replica.wait_for(revision)?;
                let fingerprint = key.map(|key| key.fingerprint.as_str());
                let same = earlier.key.as_ref().map(|(_, hash)| hash.as_str()) == fingerprint;
                Ok(Some(same.then_some(earlier.id)))
            }
        }
    }

    fn start(&self, _: &str) -> Result<()> {
        Err(StoreError::Queue("a gateway generates nothing".into()))
    }

    fn undo_start(&self, _: &str) -> Result<()> {
        Err(StoreError::Queue("a gateway generates nothing".into()))
    }

    fn finish(&self, end: &JobEnd) -> Result<bool> {
        let end = end.clone();
        let id = end.id.clone();
        self.change(&id, move |job| {
            let open = !job.state.is_final();
            if open {
                (job.state, job.error, job.finished) = (end.state, end.error.clone(), Some(end.finished));
            }
            open
        })?;
        Ok(true)
    }

    fn set_order(&self, ids: &[String]) -> Result<()> {
        let mut places: Vec<u64> = {
            let state = self.replica.state();
            ids.iter().filter_map(|id| state.jobs.get(id)).map(|job| job.record.place()).collect()
        };
        places.sort_unstable();
        for (id, place) in ids.iter().zip(places) {
            self.change(id, move |job| {
                job.rank = Some(place);
                job.state == JobState::Queued
            })?;
        }
        Ok(())
    }

    fn save_image(&self, _: &ImageRow) -> Result<()> {
        Err(StoreError::Queue("a gateway generates nothing".into()))
    }

    fn delete_images_of(&self, _: &str) -> Result<()> {
        Ok(())
    }

    fn delete_image(&self, id: &str) -> Result<bool> {
        let Some(image) = self.store.image(id)? else { return Ok(false) };
        if !self.store.is_file_shared(&image.file)? {
            self.files.remove(FileKind::Image, &image.file);
        }
        self.delete(format!("image.{id}"))?;
        Ok(true)
    }

    fn mark(&self, ids: &[String], marks: Marks) -> Result<Option<String>> {
        let mut changes = Vec::new();
        for id in ids {
            let Some(image) = self.store.image(id)? else { return Ok(Some(id.clone())) };
            let favourite = marks.favourite.unwrap_or(image.favourite);
            let trashed = marks.trash.map_or(image.trashed, |trash| trash.then(now));
            changes.push((format!("mark.{id}"), MarkRecord { favourite, trashed }));
        }
        for (key, record) in changes {
            self.put(key, record)?;
        }
        Ok(None)
    }

    fn insert_plot(&self, plot: &PlotRow) -> Result<()> {
        self.put(format!("plot.{}", plot.id), plot.clone())
    }

    fn insert_session(&self, session: &Session) -> Result<()> {
        self.put(format!("session.{}", hex(session.hash)), session.clone())
    }

    fn delete_session(&self, session: &Session) -> Result<()> {
        self.delete(format!("session.{}", hex(session.hash)))
    }

    fn remove_webhook(&self, job: &str) -> Result<()> {
        self.change(job, |job| job.webhook.take().is_some())
    }

    fn claim_input(&self, name: &str, client: &str, bytes: u64, quota: u64) -> Result<Claim> {
        // The replica decides; what it grants and evicts is written to the queue, for all gateways.
        let claim = self.store.inputs().claim(name, client, bytes, quota)?;
        if let Claim::Granted { evicted } = &claim {
            for name in evicted {
                self.delete(InputRecord::record_key(InputFiles::hash(name), client))?;
                self.files.remove(FileKind::Input, InputFiles::hash(name));
            }
            self.touch_sized(name, client, bytes)?;
        }
        Ok(claim)
    }

    fn touch_input(&self, name: &str, client: &str) -> Result<()> {
        let hash = InputFiles::hash(name);
        let size = self.files.path(FileKind::Input, hash)?.and_then(|path| path.metadata().ok());
        self.touch_sized(name, client, size.map_or(0, |metadata| metadata.len()))
    }

    fn clean_up_occasionally(&self, _: GalleryLimits) -> Result<()> {
        // The housekeeper does this.
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.store.check()?;
        Ok(self.link.check()?)
    }

    fn cancel(&self, id: &str, at_preview: bool) {
        let (link, id) = (Arc::clone(&self.link), id.to_owned());
        self.link.handle().spawn(async move { cancel(&link, &id, at_preview).await });
    }

    fn cancel_now(&self, id: &str) -> Result<()> {
        let (link, id) = (Arc::clone(&self.link), id.to_owned());
        self.link.wait(async move { cancel(&link, &id, false).await })?;
        Ok(self.replica.catch_up(&self.link)?)
    }

    fn metrics(&self, out: &mut String) {
        use std::fmt::Write;

        let (in_flight, oldest) = {
            let state = self.replica.state();
            let running = state.jobs.values().filter(|job| job.record.state == JobState::Running).count();
            let queued = state.jobs.values().filter(|job| job.record.state == JobState::Queued);
            (running, queued.map(|job| job.record.created).min())
        };
        let nodes = self.replica.nodes();
        let workers = nodes.iter().filter(|node| node.worker);
        let (count, busy) =
            workers.fold((0, 0.0), |(count, busy), node| (count + 1, busy + f64::from(node.busy)));
        let link = Arc::clone(&self.link);
        let dead = self.link.wait(async move { link.dead.get_info().await.map(|info| info.state.messages) });
        let age = oldest.map_or(0.0, |created| (now() - created).max(0) as f64 / 1000.0);
        let mut gauge = |name: &str, help: &str, value: f64| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        };
        gauge("kiln_queue_age_seconds", "Age of the oldest queued job.", age);
        gauge("kiln_jobs_in_flight", "Claimed jobs.", in_flight as f64);
        gauge("kiln_workers", "Live workers.", f64::from(count));
        gauge("kiln_utilisation", "Share of the workers that generate.", busy / f64::from(count.max(1)));
        if let Ok(Ok(dead)) = dead {
            gauge("kiln_dead_letters", "Dead letters.", dead as f64);
        }
    }
}

impl GatewayLedger {
    fn touch_sized(&self, name: &str, client: &str, bytes: u64) -> Result<()> {
        let hash = InputFiles::hash(name);
        let record = InputRecord { hash: hash.to_owned(), client: client.to_owned(), bytes, used: now() };
        self.put(InputRecord::record_key(hash, client), record)
    }
}

//! A gateway: a server that writes accepted jobs to the queue and reads from a replica of the queue's records.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_base::hex;

use super::announce::Announcer;
use super::bucket::WriteOutcome;
use super::catalogue::FleetCatalogue;
use super::changes::{cancel, change_job, read_job};
use super::config::FleetConfig;
use super::connect::MAX_RECORD;
use super::error::FleetError;
use super::gateway_health::GatewayHealth;
use super::housekeeping::Housekeeper;
use super::link::Link;
use super::mirror;
use super::objects::Objects;
use super::reconcile::Reconciler;
use super::replica::Replica;
use super::watching;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::intake::Intake;
use crate::jobs::job::{FleetPart, Job, JobState};
use crate::jobs::live::LiveJob;
use crate::jobs::random::random_bytes;
use crate::jobs::roles::{Shutdown, SubmitError, Submitting};
use crate::jobs::store::{IdempotencyKey, Store, StoreError};
use crate::jobs::{Jobs, Slot, stopping_error};
use crate::{Config, Server};

type Result<T> = std::result::Result<T, StoreError>;

/// Largest record of a new job: it grows as workers write what they do with it.
const MAX_REQUEST: usize = MAX_RECORD as usize - (128 << 10);
/// How long a repeated request waits until the first one is accepted.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens a gateway. The folder of `config` holds the replica; one of an earlier process is deleted.
pub fn open_gateway(config: Config, fleet: FleetConfig) -> std::result::Result<Server, FleetError> {
    let failed = |error: StoreError| FleetError(error.to_string());
    let link = Link::open(fleet)?;
    clear(&config.folder);
    let store = Store::open(&config.folder).map_err(failed)?;
    store.skip_syncs().map_err(failed)?;
    let store = Arc::new(store);
    let files = Objects::open(&link, &store)?;
    let replica = Replica::new(&link);
    let catalogue = Arc::new(FleetCatalogue::new(&link, &replica));
    let health = GatewayHealth::new(&link, &replica, &store);
    let jobs =
        Jobs::new(config.of_jobs(), catalogue.clone(), store, Box::new(files.clone()), Box::new(health));
    let gateway = Arc::new(Gateway {
        jobs: jobs.clone(),
        link: Arc::clone(&link),
        replica: Arc::clone(&replica),
        files: files.clone(),
        catalogue: Arc::clone(&catalogue),
        clock: SubmissionClock::default(),
    });
    let weak_gateway = Arc::downgrade(&gateway);
    let intake = Intake::new(jobs.clone(), Arc::clone(&gateway) as _, gateway);
    let server = Server::new(config, intake, None).map_err(failed)?;
    mirror::start(&server, &link, &replica, &catalogue);
    replica.catch_up(&link)?;
    let thread = |name: &str| std::thread::Builder::new().name(name.into());
    let not_started = |error| FleetError(format!("can't start threads: {error}"));
    let (weak, announcing) = (jobs.downgrade(), Arc::clone(&link));
    let mut housekeeper = Housekeeper::new(&link, &replica, &files.stored);
    let mut keep_house = move || {
        if let Some(gateway) = weak_gateway.upgrade() {
            housekeeper.work(&gateway.jobs, &*gateway);
        }
    };
    let announcing = move || Announcer::new(&announcing, false).run(&weak, |_| keep_house());
    thread("announcing").spawn(announcing).map_err(not_started)?;
    let (weak, reconciler) = (jobs.downgrade(), Reconciler::new(&link, &replica));
    let reconciling = move || reconciler.run(|| weak.upgrade().is_some());
    thread("reconciling").spawn(reconciling).map_err(not_started)?;
    link.hurry();
    server.jobs().set_ready();
    Ok(server)
}

/// Deletes the replica of an earlier process.
fn clear(folder: &Path) {
    for file in ["queue.sqlite", "queue.sqlite-wal", "queue.sqlite-shm"] {
        let _ = std::fs::remove_file(folder.join(file));
    }
}

/// Takes jobs in and gives them to the fleet. `gateway_records` keeps what clients have besides jobs.
pub(super) struct Gateway {
    pub(super) jobs: Jobs,
    pub(super) link: Arc<Link>,
    pub(super) replica: Arc<Replica>,
    pub(super) files: Objects,
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

impl Gateway {
    /// Changes the record of a job; retries after a conflict. `change` returns false to leave the record as it is.
    pub(super) fn change(&self, id: &str, change: impl Fn(&mut Job) -> bool) -> Result<()> {
        let revision = self.link.wait(change_job(&self.link, id, change))?;
        Ok(self.replica.wait_for(revision.unwrap_or(0))?)
    }

    /// Writes the record of a new job. If an earlier job has its id, that id is returned, or none if its request was
    /// another one.
    fn write_job(&self, live: &LiveJob) -> std::result::Result<Option<Option<String>>, SubmitError> {
        let (model, hash) = self.catalogue.model_of(&live.request);
        if model.is_empty() {
            return Err(StoreError::Queue("no worker has announced a model yet".into()).into());
        }
        let gateway = self.link.id.clone();
        let (sequence, submission) = (self.clock.next(&gateway), hex(random_bytes::<8>()));
        let fleet = FleetPart { model, hash, gateway, sequence, submission, ..FleetPart::default() };
        let record = Job { fleet, ..Job::clone(live) };
        let bytes = serde_json::to_vec(&record).map_or(0, |json| json.len());
        if bytes > MAX_REQUEST {
            let message =
                format!("the queue takes requests of up to {MAX_REQUEST} bytes; this one has {bytes}");
            return Err(SubmitError::Refused(JobError::new(ErrorCode::TooLarge, message)));
        }
        watching::connect(live, &self.link);
        // The job is accepted once its record is there. Only its gateway creates it: whoever finds another one has repeated
        // a request.
        let created = self.link.wait(self.link.create(&Job::record_key(&record.id), &record));
        let revision = match created.map_err(StoreError::from)? {
            WriteOutcome::Revision(revision) => revision,
            WriteOutcome::Conflict => {
                let missing = || FleetError("the record disappeared after it was created".into());
                let stored = self.link.wait(read_job(&self.link, &record.id));
                let (stored, revision) =
                    stored.and_then(|stored| stored.ok_or_else(missing)).map_err(StoreError::from)?;
                if stored.fleet.submission != record.fleet.submission {
                    self.replica.wait_for(revision).map_err(StoreError::from)?;
                    let same = stored.fingerprint() == live.fingerprint();
                    return Ok(Some(same.then_some(stored.id)));
                }
                // Its own: the answer was lost, and a worker may have claimed it since.
                revision
            }
        };
        let link = Arc::clone(&self.link);
        self.link.handle().spawn(async move {
            if let Err(error) = link.publish_ticket(&record, &record.fleet.submission).await {
                tracing::warn!(job = record.id, %error, "no ticket yet: the reconciler publishes it");
            }
        });
        // Accepted in any case; clients may see it a little later.
        if let Err(error) = self.replica.wait_for(revision) {
            tracing::warn!(job = live.id, %error, "an accepted job is not known here yet");
        }
        Ok(None)
    }

    /// Whether a job is stored that another request submits just now; waits for that. Blocks.
    fn is_accepted(&self, id: &str) -> Result<bool> {
        let until = Instant::now() + ACCEPT_TIMEOUT;
        loop {
            if self.jobs.store.job(id)?.is_some() {
                return Ok(true);
            }
            if self.jobs.live(id).is_none() || Instant::now() > until {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Shutdown for Gateway {
    /// The jobs go on elsewhere; only those who follow them must connect again.
    fn close(&self) {
        if self.jobs.stop_taking().is_none() {
            return;
        }
        let all: Vec<Arc<LiveJob>> = self.jobs.queue().live.values().cloned().collect();
        all.iter()
            .filter(|live| !live.attached)
            .for_each(|live| live.change(|s| s.error = Some(stopping_error())));
        self.jobs.closing.send_replace(true);
    }

    /// Jobs go on elsewhere: only clients of this gateway are waited for.
    fn is_awaited(&self, jobs: &Jobs) -> bool {
        // Only records name a gateway.
        let is_own = |live: &LiveJob| live.fleet.gateway.is_empty() || live.fleet.gateway == self.link.id;
        jobs.queue().live.values().any(|live| live.attached && is_own(live))
    }
}

impl Submitting for Gateway {
    fn new_id(&self, key: Option<&IdempotencyKey>) -> String {
        key.map_or_else(|| hex(random_bytes::<12>()), IdempotencyKey::job_id)
    }

    fn submit(&self, live: &Arc<LiveJob>, mut place: Slot) -> std::result::Result<(), SubmitError> {
        // Before it is submitted: a worker may be done with it before this goes on.
        let earlier = {
            let mut queue = self.jobs.queue();
            let earlier = queue.live.insert_new(live);
            if earlier.is_none() {
                place.leave_to_the_job(&mut queue);
            }
            earlier
        };
        if let Some(earlier) = earlier {
            drop(place);
            if !self.is_accepted(&live.id).map_err(SubmitError::Store)? {
                let reason = "an earlier request with this key was not accepted; try again";
                return Err(SubmitError::Store(StoreError::Queue(reason.into())));
            }
            let same = earlier.fingerprint() == live.fingerprint();
            return Err(SubmitError::Repeated(same.then(|| live.id.clone())));
        }
        let written = self.write_job(live);
        drop(place);
        let failed = match written {
            Ok(None) => return Ok(()),
            Ok(Some(earlier)) => SubmitError::Repeated(earlier),
            Err(error) => error,
        };
        // Its record may be there by now, from another gateway or from this one, and the mirror shows this job for it.
        self.jobs.remove_unaccepted(live);
        Err(failed)
    }

    fn cancel(&self, id: &str) -> bool {
        let Some(live) = self.jobs.live(id) else { return false };
        live.cancel();
        let (link, id) = (Arc::clone(&self.link), id.to_owned());
        self.link.handle().spawn(async move { drop(cancel(&link, &id, false).await) });
        true
    }

    fn cancel_now(&self, id: &str) -> Result<bool> {
        let Some(live) = self.jobs.live(id) else { return Ok(false) };
        let revision = self.link.wait(cancel(&self.link, id, false))?;
        live.cancel();
        match revision {
            Some(revision) => self.replica.wait_for(revision)?,
            None => self.replica.catch_up(&self.link)?,
        }
        Ok(revision.is_some())
    }

    /// The places come back with the records.
    fn reorder(&self, client: &str, order: &[String]) -> Result<()> {
        let ids = self.jobs.queue().waiting.clone().reorder(client, order);
        let mut places: Vec<u64> = {
            let state = self.replica.state();
            ids.iter().filter_map(|id| state.jobs.get(id)).map(|job| job.record.place()).collect()
        };
        places.sort_unstable();
        for (id, place) in ids.iter().zip(places) {
            self.change(id, move |job| {
                job.fleet.rank = Some(place);
                job.state == JobState::Queued
            })?;
        }
        Ok(())
    }
}

//! What a gateway shows: records become database rows and jobs in its queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_nats::jetstream::kv::Entry;
use bytes::Bytes;
use kiln_base::lock;
use kiln_engine::Progress;
use serde::de::DeserializeOwned;

use super::announce::NodeModel;
use super::bucket::is_present;
use super::catalogue::FleetCatalogue;
use super::link::Link;
use super::records::{ImageRecord, InputRecord, MarkRecord};
use super::replica::{Follower, Replica};
use super::watching::{self, connect};
use crate::Server;
use crate::jobs::error::{ErrorCode, JobError};
use crate::jobs::job::{Job, JobState};
use crate::jobs::live::{LiveJob, SavedImage};
use crate::jobs::sessions::Session;
use crate::jobs::store::{FileKind, ImageRow, PlotRow, StoreError};

/// Most unknown jobs whose images are kept.
const MAX_EARLY: usize = 100_000;

/// Follows the records and the workers' messages.
pub(super) fn start(
    server: &Server,
    link: &Arc<Link>,
    replica: &Arc<Replica>,
    catalogue: &Arc<FleetCatalogue>,
) {
    let mirror = Mirror {
        server: server.downgrade(),
        link: Arc::downgrade(link),
        catalogue: Arc::clone(catalogue),
        early: Mutex::default(),
    };
    link.handle().spawn(Arc::clone(replica).follow(Arc::downgrade(link), mirror));
    watching::follow(server, link);
}

struct Mirror {
    server: crate::http::server::WeakServer,
    link: std::sync::Weak<Link>,
    catalogue: Arc<FleetCatalogue>,
    /// Images whose job is not known yet: in a replay of the bucket, a job's last revision comes after its images.
    early: Mutex<HashMap<String, Vec<(ImageRecord, u64)>>>,
}

impl Follower for Mirror {
    fn before(&self, entry: &Entry) {
        if let Err(error) = self.apply(entry) {
            tracing::error!(key = entry.key, %error, "can't apply a record");
        }
    }

    fn after(&self) {
        if let Some(server) = self.server.upgrade() {
            server.jobs().wake_all();
        }
    }

    fn lost(&self, jobs: &[String]) {
        let Some(server) = self.server.upgrade() else { return };
        let message = "the queue's records were deleted, and the job with them";
        for live in jobs.iter().filter_map(|id| server.jobs().live(id)) {
            server.jobs().remove_waiting(&live.id);
            let error = JobError::new(ErrorCode::Lost, message);
            live.change(|s| (s.state, s.error) = (JobState::Failed, Some(error.clone())));
        }
    }
}

/// Reads a record; one that can't be read is reported and skipped.
fn read<T: DeserializeOwned>(entry: &Entry) -> Option<T> {
    let read = serde_json::from_slice(&entry.value);
    read.inspect_err(|error| tracing::warn!(key = entry.key, %error, "ignoring a record that can't be read"))
        .ok()
}

impl Mirror {
    fn apply(&self, entry: &Entry) -> Result<(), StoreError> {
        let Some(server) = self.server.upgrade() else { return Ok(()) };
        let store = &server.jobs().store;
        let (kind, name) = entry.key.split_once('.').unwrap_or((&entry.key, ""));
        let present = is_present(entry);
        match kind {
            "job" if !present => {
                store.drop_job(name)?;
                server.jobs().remove_waiting(name);
            }
            "job" => {
                let Some(job) = read::<Job>(entry).filter(|job| job.id == name) else { return Ok(()) };
                store.put_job(&job)?;
                for (image, revision) in lock(&self.early).remove(name).unwrap_or_default() {
                    self.show_image(&server, image, revision)?;
                }
                self.show_job(&server, Arc::new(job));
            }
            "image" if !present => store.drop_image(name)?,
            "image" => {
                let Some(image) = read::<ImageRecord>(entry).filter(|image| image.row.id == name) else {
                    return Ok(());
                };
                return self.show_image(&server, image, entry.revision);
            }
            "mark" => {
                let Some(marks) = read::<MarkRecord>(entry) else { return Ok(()) };
                store.put_marks(name, marks.favourite, marks.trashed)?;
            }
            "plot" if present => {
                let Some(plot) = read::<PlotRow>(entry) else { return Ok(()) };
                store.insert_plot(&plot)?;
            }
            "input" if !present => {
                let (hash, client) = name.split_once('.').unwrap_or((name, ""));
                store.drop_input(hash, client)?;
            }
            "input" => {
                let Some(input) = read::<InputRecord>(entry) else { return Ok(()) };
                store.put_input(&input.hash, &input.client, input.bytes, input.used)?;
            }
            "session" => match read::<Session>(entry) {
                Some(session) if present => server.auth.sessions.add(session),
                _ => server.auth.sessions.remove(name),
            },
            "model" if present => {
                if let Some(model) = read::<NodeModel>(entry) {
                    self.catalogue.remember(model);
                }
            }
            "model" => self.catalogue.forget(name),
            _ => {}
        }
        Ok(())
    }

    fn show_image(&self, server: &Server, image: ImageRecord, revision: u64) -> Result<(), StoreError> {
        let Some(job) = server.jobs().store.job(&image.row.job)? else {
            let mut early = lock(&self.early);
            if early.len() < MAX_EARLY {
                early.entry(image.row.job.clone()).or_default().push((image, revision));
            }
            return Ok(());
        };
        let row = ImageRow { request: job.request, ..image.row };
        let is_own = row.id == format!("{}-{}", row.job, row.number)
            && u64::from(row.number) < row.request.image_count() as u64;
        if !is_own {
            tracing::error!(
                image = row.id,
                worker = image.worker,
                "ignoring an image that its job did not ask for"
            );
            return Ok(());
        }
        server.jobs().store.insert_image(&row, Some(i64::try_from(revision).unwrap_or(i64::MAX)))?;
        if let Some(live) = server.jobs().live(&row.job) {
            live.change(|s| {
                s.images.retain(|other| other.row.id != row.id);
                s.images.push(Arc::new(SavedImage { row, bytes: Bytes::new() }));
                s.images.sort_by_key(|image| image.row.number);
            });
        }
        Ok(())
    }

    /// Brings the queue in line with a job's record.
    fn show_job(&self, server: &Server, job: Arc<Job>) {
        // A request with the same key may have asked for something else, and be refused in a moment.
        let known = server.jobs().live(&job.id).filter(|live| live.fingerprint() == job.fingerprint());
        if job.state.is_final() {
            match known {
                Some(live) => end(server, live, job, self.link.clone()),
                None => drop(server.jobs().queue().waiting.remove(&job.id)),
            }
            return;
        }
        let live = known.unwrap_or_else(|| {
            let live = LiveJob::new(Arc::clone(&job));
            if let Some(link) = self.link.upgrade() {
                connect(&live, &link);
            }
            Arc::new(live)
        });
        let mut queue = server.jobs().queue();
        queue.live.insert(Arc::clone(&live));
        match job.state {
            JobState::Queued => {
                queue.active.retain(|active| active.id != job.id);
                queue.waiting.remove(&job.id);
                queue.waiting.insert(job.clone());
            }
            _ => {
                queue.waiting.take_id(&job.id, false);
                if !queue.active.iter().any(|active| active.id == job.id) {
                    queue.active.push(Arc::clone(&live));
                }
            }
        }
        drop(queue);
        let is_new = live.state() != job.state;
        if is_new {
            live.change(|s| {
                s.state = job.state;
                s.progress = Progress::default();
            });
        }
        // Requests for previews from before it ran may have been lost.
        if is_new && job.state == JobState::Running && live.wants_previews() {
            live.poll_preview();
        }
    }
}

/// Ends a job for those who wait for it here.
fn end(server: &Server, live: Arc<LiveJob>, job: Arc<Job>, link: std::sync::Weak<Link>) {
    let Some(link) = link.upgrade() else { return };
    server.jobs().queue().waiting.remove(&job.id);
    let is_local = job.fleet.gateway == link.id;
    let finish = {
        let (server, live) = (server.clone(), Arc::clone(&live));
        move |images: Option<Vec<Arc<SavedImage>>>| {
            let took =
                job.started.zip(job.finished).map_or(0, |(started, finished)| (finished - started).max(0));
            let took = std::time::Duration::from_millis(took as u64);
            let error = job.error.clone().filter(|_| job.state != JobState::Done);
            let code = error.as_ref().map(|error| error.code).filter(|_| job.state == JobState::Failed);
            server.jobs().metrics.job(job.state, code, took, job.cost);
            server.jobs().remove_job(&live);
            live.change(|s| {
                (s.state, s.error, s.notes) = (job.state, error, job.notes.clone());
                if let Some(images) = images {
                    s.images = images;
                }
                if !live.stops_with_preview() {
                    s.preview = None;
                }
            });
            if is_local && job.webhook.is_some() {
                server.webhooks.call(&live.id);
            }
        }
    };
    let images = live.snapshot().images;
    if !(live.attached && is_local) || images.is_empty() {
        return finish(None);
    }
    // The client waits for the bytes. They are fetched on another thread, so as not to block the records.
    let server = server.clone();
    link.handle().spawn_blocking(move || {
        let load = |image: &Arc<SavedImage>| {
            let path = server.jobs().files.path(FileKind::Image, &image.row.file).ok().flatten()?;
            let bytes = Bytes::from(std::fs::read(path).ok()?);
            Some(Arc::new(SavedImage { row: image.row.clone(), bytes }))
        };
        let loaded: Option<Vec<_>> = images.iter().map(load).collect();
        if loaded.is_none() {
            tracing::error!(job = live.id, "an image of a job is missing, or does not match its hash");
        }
        finish(loaded);
    });
}

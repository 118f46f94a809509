//! A gateway's background work: it deletes images and jobs beyond the gallery's limits and orphaned files, which does
//! no harm if two gateways do it. The oldest gateway also calls the webhooks of gateways that are gone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::changes::read_job;
use super::error::{FleetError, Result};
use super::link::Link;
use super::objects::{StoredFiles, object_name};
use super::replica::Replica;
use crate::jobs::Jobs;
use crate::jobs::job::Job;
use crate::jobs::roles::Keeping;
use crate::jobs::store::StoreError;

/// How often images and jobs beyond the gallery's limits are deleted.
const GALLERY: Duration = Duration::from_secs(60);
/// How often orphaned files are deleted.
const ORPHANS: Duration = Duration::from_secs(3600);

/// The housekeeping of a gateway.
pub(super) struct Housekeeper {
    link: Arc<Link>,
    replica: Arc<Replica>,
    /// Without the local copies: their folder must be free for the next process once the server is gone.
    files: StoredFiles,
    cleaned: Instant,
    swept: Option<Instant>,
    /// Ended jobs whose webhooks are not called yet, each with the gateway that accepted it.
    callers: HashMap<String, String>,
}

impl Housekeeper {
    pub(super) fn new(link: &Arc<Link>, replica: &Arc<Replica>, files: &StoredFiles) -> Housekeeper {
        let (link, replica, files) = (Arc::clone(link), Arc::clone(replica), files.clone());
        let callers = HashMap::new();
        Housekeeper { link, replica, files, cleaned: Instant::now(), swept: None, callers }
    }

    /// Does what is due; blocks.
    pub(super) fn work(&mut self, jobs: &Jobs, keeping: &impl Keeping) {
        let report = |result: std::result::Result<(), StoreError>, what: &str| {
            if let Err(error) = result {
                tracing::warn!(%error, "failed to {what}");
            }
        };
        report(self.call_webhooks(jobs), "call webhooks");
        if self.cleaned.elapsed() >= GALLERY {
            self.cleaned = Instant::now();
            report(self.clean_gallery(jobs, keeping), "delete old images");
        }
        if self.swept.is_none_or(|swept| swept.elapsed() >= ORPHANS) {
            self.swept = Some(Instant::now());
            report(self.delete_orphans(jobs).map_err(StoreError::from), "delete orphaned files");
        }
    }

    fn clean_gallery(&self, jobs: &Jobs, keeping: &impl Keeping) -> std::result::Result<(), StoreError> {
        let (images, ended) = jobs.store.beyond(jobs.config.gallery)?;
        for id in images {
            keeping.delete_image(&id)?;
        }
        for id in ended {
            self.link.wait(self.link.delete(&Job::record_key(&id)))?;
        }
        Ok(())
    }

    fn delete_orphans(&self, jobs: &Jobs) -> Result<()> {
        self.files.delete_orphans(|| {
            self.replica.catch_up(&self.link)?;
            let files = jobs.store.known_files();
            let files = files.map_err(|error| FleetError(error.to_string()))?;
            Ok(files.into_iter().map(|(kind, name)| object_name(kind, &name)).collect())
        })
    }

    /// Calls the webhooks of ended jobs that were not called: a gateway's own, whose end it may have missed, and the
    /// oldest gateway those of gateways that are gone.
    fn call_webhooks(&mut self, jobs: &Jobs) -> std::result::Result<(), StoreError> {
        let eldest = self.replica.nodes().into_iter().find(|node| !node.worker);
        let is_eldest = eldest.is_some_and(|node| node.id == self.link.id);
        let uncalled: HashSet<String> = jobs.store.uncalled_webhooks()?.into_iter().collect();
        self.callers.retain(|job, _| uncalled.contains(job));
        for job in uncalled {
            let caller = match self.callers.get(&job) {
                Some(caller) => caller.clone(),
                None => {
                    let Some((record, _)) = self.link.wait(read_job(&self.link, &job))? else { continue };
                    // Called at the earliest when it is seen again: its own gateway may be about to do so.
                    self.callers.insert(job.clone(), record.fleet.gateway);
                    continue;
                }
            };
            if caller == self.link.id || (is_eldest && !self.replica.may_be_alive(&caller)) {
                jobs.recorded_end(&job);
            }
        }
        Ok(())
    }
}

//! Tickets from records: a gateway compares them every few seconds and mends what does not fit. One gateway at a time
//! does so, by a lease in the bucket; two would do no harm.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_base::hex;
use serde::{Deserialize, Serialize};

use super::bucket::WriteOutcome;
use super::error::{FleetError, Result};
use super::link::{Link, token};
use super::recover::recover;
use super::replica::{KnownJob, Replica};
use super::rules::{self, Mend, ModelView};
use crate::jobs::job::{Job, JobState};
use crate::jobs::random::random_bytes;

/// The key of the lease.
const LEASE: &str = "fleet.reconciler";
/// Most tickets that are published at a time; the rest follow.
const MAX_PUBLISHED: u64 = 1000;

/// Who reconciles, in [`LEASE`]. It is renewed at every look: one that stays as it is has expired. So no clock of another
/// machine matters.
#[derive(Debug, Serialize, Deserialize)]
struct Lease {
    gateway: String,
}

/// The reconciler of a gateway.
pub(super) struct Reconciler {
    link: Arc<Link>,
    replica: Arc<Replica>,
    /// The revision of the lease, whose it is, and since when it has that revision.
    lease: Option<(u64, bool, Instant)>,
    /// The jobs that were unfinished at the last look.
    unfinished: HashSet<String>,
    /// Running jobs whose workers are gone, and since when.
    abandoned: HashMap<String, Instant>,
    /// The first queued job of each model, its revision, and since when; whether a ticket was published for it.
    stalled: HashMap<String, (String, u64, Instant, bool)>,
}

/// What is on the stream for a model.
struct StreamView {
    tickets: u64,
    stored: u64,
}

impl Reconciler {
    pub(super) fn new(link: &Arc<Link>, replica: &Arc<Replica>) -> Reconciler {
        Reconciler {
            link: Arc::clone(link),
            replica: Arc::clone(replica),
            lease: None,
            unfinished: HashSet::new(),
            abandoned: HashMap::new(),
            stalled: HashMap::new(),
        }
    }

    /// Looks at intervals as long as `goes_on`; blocks.
    pub(super) fn run(mut self, goes_on: impl Fn() -> bool) {
        let interval =
            (self.link.config.ack_wait / 4).clamp(Duration::from_millis(250), Duration::from_secs(5));
        while goes_on() {
            let looked = match self.take_lease(interval) {
                Ok(true) => self.look(),
                Ok(false) => {
                    self.unfinished.clear();
                    Ok(())
                }
                Err(error) => Err(error),
            };
            if let Err(error) = looked {
                tracing::warn!(%error, "can't compare tickets and records");
            }
            std::thread::sleep(interval);
        }
    }

    /// Takes or renews the lease; returns whether this gateway has it.
    fn take_lease(&mut self, interval: Duration) -> Result<bool> {
        let (link, own) = (&self.link, Lease { gateway: self.link.id.clone() });
        let known = self.lease;
        let taken = link.wait(async {
            let (revision, outcome) = match known {
                Some((revision, true, _)) => (revision, link.update(LEASE, &own, revision).await?),
                _ => match link.entry(LEASE).await? {
                    None => (0, link.create(LEASE, &own).await?),
                    Some(entry) => match known {
                        // It was not renewed for some time: expired.
                        Some((revision, false, since))
                            if revision == entry.revision && since.elapsed() > 3 * interval =>
                        {
                            (revision, link.update(LEASE, &own, revision).await?)
                        }
                        _ => (entry.revision, WriteOutcome::Conflict),
                    },
                },
            };
            Ok::<_, FleetError>((revision, outcome))
        })?;
        self.lease = match taken {
            (_, WriteOutcome::Revision(revision)) => Some((revision, true, Instant::now())),
            (revision, WriteOutcome::Conflict) => match known {
                Some((known, false, since)) if known == revision => Some((known, false, since)),
                // Whose it is now is seen at the next look.
                _ => Some((revision, false, Instant::now())),
            },
        };
        Ok(self.lease.is_some_and(|(_, is_own, _)| is_own))
    }

    /// Compares once.
    fn look(&mut self) -> Result<()> {
        // The tickets first: a job that is unfinished afterwards, and was before, needed its ticket in between.
        let models: HashSet<String> =
            self.replica.state().jobs.values().map(|job| job.record.fleet.model.clone()).collect();
        let (last, streams) = self.count_tickets(&models)?;
        self.replica.catch_up(&self.link)?;
        let jobs: Vec<KnownJob> = self.replica.state().jobs.values().cloned().collect();
        self.recover_abandoned(&jobs)?;
        let before = std::mem::take(&mut self.unfinished);
        self.unfinished = jobs.iter().map(|job| job.record.id.clone()).collect();
        for (subject, StreamView { tickets, stored }) in streams {
            let of_model = |job: &&KnownJob| self.link.ticket_subject(&job.record.fleet.model) == subject;
            let own: Vec<&KnownJob> = jobs.iter().filter(of_model).collect();
            let settled = own.iter().filter(|job| before.contains(&job.record.id)).count() as u64;
            let view = ModelView { tickets, stored, unfinished: own.len() as u64, settled };
            match rules::reconcile(view) {
                Mend::Nothing => self.nudge(&subject, &own)?,
                Mend::Publish(missing) => {
                    tracing::warn!(subject, missing, "publishing tickets that are missing");
                    let mut queued = own.iter().filter(|job| job.record.state == JobState::Queued).cycle();
                    for _ in 0..missing.min(MAX_PUBLISHED) {
                        let job = queued.next().or(own.first()).map(|job| Arc::clone(&job.record));
                        job.map_or(Ok(()), |job| self.publish(&job))?;
                    }
                }
                Mend::Purge => self.purge(subject, last)?,
            }
        }
        Ok(())
    }

    /// The last sequence of the stream, and what is on it for each subject. A stream that is gone is created again.
    fn count_tickets(&self, models: &HashSet<String>) -> Result<(u64, HashMap<String, StreamView>)> {
        let link = &self.link;
        let counting = async {
            let failed = |error: &dyn std::fmt::Display| FleetError(format!("counting tickets: {error}"));
            link.restore_stream(&link.jobs).await?;
            let last = link.jobs.get_info().await.map_err(|error| failed(&error))?.state.last_sequence;
            let all = link.subject("jobs", ">");
            let mut subjects = link.jobs.info_with_subjects(all).await.map_err(|error| failed(&error))?;
            let mut streams: HashMap<String, StreamView> = models
                .iter()
                .map(|model| (link.ticket_subject(model), StreamView { tickets: 0, stored: 0 }))
                .collect();
            while let Some(subject) = futures_util::StreamExt::next(&mut subjects).await {
                let (subject, count) = subject.map_err(|error| failed(&error))?;
                streams.insert(subject, StreamView { tickets: count as u64, stored: count as u64 });
            }
            for model in models {
                // Tickets that no worker can get are none. Without a consumer its first worker gets them all.
                if let Ok(info) = link.jobs.consumer_info(token(model)).await
                    && let Some(view) = streams.get_mut(&link.ticket_subject(model))
                {
                    view.tickets = view.tickets.min(info.num_pending + info.num_ack_pending as u64);
                }
            }
            Ok((last, streams))
        };
        link.wait(async {
            let limit = tokio::time::timeout(Duration::from_secs(20), counting);
            limit.await.unwrap_or_else(|_| Err(FleetError("counting tickets: timed out".into())))
        })
    }

    /// Takes jobs from workers that are gone, if their tickets did not bring that about.
    fn recover_abandoned(&mut self, jobs: &[KnownJob]) -> Result<()> {
        let is_abandoned = |job: &&KnownJob| {
            let worker = job.record.fleet.worker.as_deref().unwrap_or_default();
            job.record.state == JobState::Running && !self.replica.may_be_alive(worker)
        };
        let abandoned: Vec<&KnownJob> = jobs.iter().filter(is_abandoned).collect();
        let key = |job: &KnownJob| format!("{}@{}", job.record.id, job.revision);
        let mut since = HashMap::new();
        for job in abandoned {
            let key = key(job);
            let gone_since = self.abandoned.get(&key).copied().unwrap_or_else(Instant::now);
            since.insert(key, gone_since);
            if gone_since.elapsed() > self.link.config.ack_wait {
                recover(&self.link, &self.replica, job.clone())?;
            }
        }
        self.abandoned = since;
        Ok(())
    }

    /// Publishes a ticket for a job that stays where it is although a worker is idle, once: the stream may have a ticket
    /// that it does not deliver.
    fn nudge(&mut self, subject: &str, jobs: &[&KnownJob]) -> Result<()> {
        let queued = jobs.iter().filter(|job| job.record.state == JobState::Queued);
        let Some(first) = queued.min_by_key(|job| job.record.place()) else {
            self.stalled.remove(subject);
            return Ok(());
        };
        let has_idle_worker = self.replica.nodes().iter().any(|node| {
            let has_model = node.models.iter().any(|model| model.info.name == first.record.fleet.model);
            node.worker && !node.draining && node.jobs.is_empty() && has_model
        });
        let (id, revision) = (&first.record.id, first.revision);
        match self.stalled.get_mut(subject) {
            Some((known, at, since, nudged)) if known == id && *at == revision && has_idle_worker => {
                if !*nudged && since.elapsed() > (2 * self.link.config.ack_wait).max(Duration::from_secs(2)) {
                    *nudged = true;
                    tracing::warn!(job = id, "publishing a further ticket for a job that no worker takes");
                    return self.publish(&first.record);
                }
            }
            Some((known, at, _, _)) if known == id && *at == revision => {}
            _ => {
                let entry = (id.clone(), revision, Instant::now(), false);
                self.stalled.insert(subject.to_owned(), entry);
            }
        }
        Ok(())
    }

    fn publish(&self, job: &Job) -> Result<()> {
        // A new id: the stream must not take it for a repetition.
        self.link.wait(self.link.publish_ticket(job, &hex(random_bytes::<8>())))
    }

    /// Removes the tickets that were there when they were counted.
    fn purge(&self, subject: String, last: u64) -> Result<()> {
        tracing::info!(subject, "removing tickets of jobs that have ended");
        self.link.wait(async {
            let purged = self.link.jobs.purge().sequence(last + 1).filter(subject).await;
            purged.map(|_| ()).map_err(|error| FleetError(format!("removing tickets: {error}")))
        })
    }
}

//! A fleet's queue for its operator: nodes, unfinished jobs and dead letters.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use futures_util::StreamExt;

use super::announce::NodeRecord;
use super::bucket::WriteOutcome;
use super::changes::{cancel, read_job};
use super::config::FleetConfig;
use super::error::{FleetError, Result};
use super::link::Link;
use super::replica::{Follower, Replica};
use crate::jobs::job::{Job, JobState};

/// A job as its operator sees it.
#[derive(Clone, Debug)]
pub struct FleetJob {
    /// Its id.
    pub id: String,
    /// Who submitted it.
    pub client: String,
    /// `queued`, `running`, `done`, `failed` or `cancelled`.
    pub state: &'static str,
    /// `low`, `normal` or `high`.
    pub priority: &'static str,
    /// Its model.
    pub model: String,
    /// The worker that runs it.
    pub worker: Option<String>,
    /// When it was submitted, in milliseconds since 1970.
    pub created: i64,
    /// How often it was started.
    pub attempts: u32,
    /// Code and message of its error.
    pub error: Option<(String, String)>,
    /// The whole record as JSON.
    pub json: String,
}

impl From<&Job> for FleetJob {
    fn from(job: &Job) -> FleetJob {
        FleetJob {
            id: job.id.clone(),
            client: job.client.clone(),
            state: job.state.name(),
            priority: job.priority.name(),
            model: job.fleet.model.clone(),
            worker: job.fleet.worker.clone(),
            created: job.created,
            attempts: job.attempts,
            error: job.error.as_ref().map(|error| (error.code.name().into(), error.message.clone())),
            json: serde_json::to_string_pretty(job).unwrap_or_default(),
        }
    }
}

/// A connection for `kiln queue` and `kiln workers`.
pub struct QueueAdmin {
    link: Arc<Link>,
    replica: Arc<Replica>,
}

/// Needs only what the replica knows.
struct Nobody;

impl Follower for Nobody {
    fn before(&self, _: &async_nats::jetstream::kv::Entry) {}
}

impl QueueAdmin {
    /// Connects to the queue and reads its records.
    pub fn open(config: FleetConfig) -> Result<QueueAdmin> {
        let link = Link::open(config)?;
        let replica = Replica::new(&link);
        link.handle().spawn(Arc::clone(&replica).follow(Arc::downgrade(&link), Nobody));
        replica.catch_up_reading(&link)?;
        Ok(QueueAdmin { link, replica })
    }

    /// The gateways and workers that announce themselves. Waits a moment, to leave out those that are gone.
    pub fn nodes(&self) -> Vec<NodeRecord> {
        let (before, started) = (self.replica.nodes(), std::time::Instant::now());
        let patience =
            (self.link.config.ack_wait / 4).clamp(Duration::from_millis(200), Duration::from_secs(6));
        while !before.is_empty() && started.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(50));
            let now = self.replica.nodes();
            // Every node has announced itself since, or is new.
            if now.iter().all(|node| before.iter().all(|old| old.id != node.id || !Arc::ptr_eq(old, node))) {
                break;
            }
        }
        let now = self.replica.nodes();
        let is_fresh = |node: &&Arc<NodeRecord>| !before.iter().any(|old| Arc::ptr_eq(old, node));
        now.iter().filter(is_fresh).map(|node| NodeRecord::clone(node)).collect()
    }

    /// The unfinished jobs: running ones first, then the queued ones, oldest first.
    pub fn jobs(&self) -> Vec<FleetJob> {
        let state = self.replica.state();
        let mut jobs: Vec<_> = state.jobs.values().map(|job| Arc::clone(&job.record)).collect();
        drop(state);
        jobs.sort_by_key(|job| (job.state != JobState::Running, job.place()));
        jobs.iter().map(|job| FleetJob::from(&**job)).collect()
    }

    /// A job, finished or not.
    pub fn job(&self, id: &str) -> Result<Option<FleetJob>> {
        let job = self.link.wait(read_job(&self.link, id))?;
        Ok(job.map(|(job, _)| FleetJob::from(&job)))
    }

    /// The dead letters, oldest first.
    pub fn dead(&self) -> Result<Vec<FleetJob>> {
        let letters = self.dead_letters()?;
        Ok(letters.iter().map(|(_, job)| FleetJob::from(job)).collect())
    }

    fn dead_letters(&self) -> Result<Vec<(u64, Job)>> {
        self.link.wait(async {
            let failed = |error: &dyn std::fmt::Display| FleetError(format!("reading dead letters: {error}"));
            let config = pull::Config {
                deliver_policy: DeliverPolicy::All,
                ack_policy: async_nats::jetstream::consumer::AckPolicy::None,
                inactive_threshold: Duration::from_secs(30),
                ..pull::Config::default()
            };
            let consumer = self.link.dead.create_consumer(config).await.map_err(|error| failed(&error))?;
            let mut letters = Vec::new();
            loop {
                let fetch = consumer.fetch().max_messages(500).messages();
                let mut batch = fetch.await.map_err(|error| failed(&error))?;
                let before = letters.len();
                while let Some(message) = batch.next().await {
                    let message = message.map_err(|error| failed(&error))?;
                    let sequence = message.info().map_or(0, |info| info.stream_sequence);
                    letters.push((sequence, serde_json::from_slice::<Job>(&message.payload).ok()));
                }
                if letters.len() == before {
                    break;
                }
            }
            Ok(letters.into_iter().filter_map(|(sequence, job)| Some((sequence, job?))).collect())
        })
    }

    /// Queues a failed job again, with a new ticket, and deletes its dead letter. Returns false if no job of this id
    /// has failed.
    pub fn retry(&self, id: &str) -> Result<bool> {
        let Some((mut job, revision)) = self.link.wait(read_job(&self.link, id))? else { return Ok(false) };
        if job.state != JobState::Failed {
            return Ok(false);
        }
        job.return_to_queue();
        (job.fleet.kills, job.fleet.failures, job.fleet.losses) = (0, 0, 0);
        job.fleet.suspects.clear();
        (job.fleet.cancel, job.fleet.stop_at_preview) = (false, false);
        (job.error, job.finished) = (None, None);
        job.fleet.failed_on.clear();
        job.fleet.history.push("retried by the operator".into());
        let written = self.link.wait(self.link.update(&Job::record_key(id), &job, revision))?;
        if written == WriteOutcome::Conflict {
            return Ok(false);
        }
        self.link.wait(self.link.publish_ticket(&job, &format!("{id}-retry-{revision}")))?;
        self.purge_dead(Some(id))?;
        Ok(true)
    }

    /// Deletes the dead letters of a job, or all of them; returns their number.
    pub fn purge_dead(&self, id: Option<&str>) -> Result<usize> {
        let letters = self.dead_letters()?;
        let chosen = letters.iter().filter(|(_, job)| id.is_none_or(|id| job.id == id));
        let sequences: Vec<u64> = chosen.map(|(sequence, _)| *sequence).collect();
        for sequence in &sequences {
            let deleted = self.link.wait(self.link.dead.delete_message(*sequence));
            deleted.map_err(|error| FleetError(format!("deleting a dead letter: {error}")))?;
        }
        Ok(sequences.len())
    }

    /// The number of tickets on the stream: at least that of unfinished jobs, and 0 once all are done.
    pub fn tickets(&self) -> Result<u64> {
        let info = self.link.wait(self.link.jobs.get_info());
        info.map(|info| info.state.messages).map_err(|error| FleetError(error.to_string()))
    }

    /// Cancels a job, or all unfinished ones; returns their number. Running ones stop within a step.
    pub fn purge(&self, id: Option<&str>) -> Result<usize> {
        let ids: Vec<String> = {
            let state = self.replica.state();
            state.jobs.keys().filter(|known| id.is_none_or(|id| *known == id)).cloned().collect()
        };
        let mut cancelled = 0;
        for id in &ids {
            cancelled += usize::from(self.link.wait(cancel(&self.link, id, false))?.is_some());
        }
        Ok(cancelled)
    }
}

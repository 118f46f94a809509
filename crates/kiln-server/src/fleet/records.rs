//! The records of a fleet as JSON, and how they become rows of the database.

use kiln_base::hex;
use kiln_engine::Request;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::live::{Api, LiveJob};
use crate::priority::Priority;
use crate::store::{IdempotencyKey, ImageRow, JobRow, JobState};

/// A ticket: its sequence on the stream, and when it was stored. A stream that was deleted and created again numbers its
/// messages anew, but at other times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TicketId {
    /// In nanoseconds since 1970.
    pub(crate) stored: i64,
    pub(crate) sequence: u64,
}

/// A job, in its ticket and in `job.ID`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    pub(crate) id: String,
    pub(crate) client: String,
    pub(crate) attached: bool,
    pub(crate) api: Api,
    pub(crate) request: Request,
    /// The model: the default one if the request names none.
    pub(crate) model: String,
    /// The hash of the model's weights, as the gateway knew it.
    #[serde(default)]
    pub(crate) hash: Option<String>,
    pub(crate) cost: f64,
    #[serde(default)]
    pub(crate) priority: Priority,
    pub(crate) state: JobState,
    /// Its place in the order of submission: see [`super::gateway::SubmissionClock`].
    #[serde(default)]
    pub(crate) sequence: u64,
    /// Tells a submission apart from another one with the same idempotency key.
    #[serde(default)]
    pub(crate) submission: String,
    /// Set if its client reordered its jobs: the sequence of the job whose place it has.
    #[serde(default)]
    pub(crate) rank: Option<u64>,
    pub(crate) created: i64,
    #[serde(default)]
    pub(crate) started: Option<i64>,
    #[serde(default)]
    pub(crate) finished: Option<i64>,
    /// How often it was started.
    #[serde(default)]
    pub(crate) attempts: u32,
    /// How many of `suspects` were gone when the last one was lost.
    #[serde(default)]
    pub(crate) kills: u32,
    /// The workers that were lost while they ran it.
    #[serde(default)]
    pub(crate) suspects: Vec<String>,
    /// How many workers were lost that had claimed it and did not run it yet.
    #[serde(default)]
    pub(crate) losses: u32,
    /// How often it failed with an error of a worker.
    #[serde(default)]
    pub(crate) failures: u32,
    /// The workers that it failed on.
    #[serde(default)]
    pub(crate) failed_on: Vec<String>,
    /// What happened to it so far.
    #[serde(default)]
    pub(crate) history: Vec<String>,
    /// Code and message of its last error.
    #[serde(default)]
    pub(crate) error: Option<(String, String)>,
    #[serde(default)]
    pub(crate) notes: Vec<String>,
    /// Who runs it, or ran it last.
    #[serde(default)]
    pub(crate) worker: Option<String>,
    /// The sequence of the ticket that it runs with, or ran with.
    #[serde(default)]
    ticket: Option<u64>,
    /// When that ticket was stored.
    #[serde(default)]
    ticket_stored: Option<i64>,
    /// Whether its worker has begun to generate it.
    #[serde(default)]
    pub(crate) began: bool,
    /// Whether its worker is to cancel it.
    #[serde(default)]
    pub(crate) cancel: bool,
    /// Whether it is to stop at its next preview.
    #[serde(default)]
    pub(crate) stop_at_preview: bool,
    /// The gateway that accepted it.
    pub(crate) gateway: String,
    /// Its idempotency key, and the hash of its request.
    #[serde(default)]
    pub(crate) key: Option<(String, String)>,
    /// The URL to call at its end.
    #[serde(default)]
    pub(crate) webhook: Option<String>,
    /// The trace context of its submission, as in `traceparent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trace: Option<String>,
}

impl JobRecord {
    pub(crate) fn new(
        row: &JobRow,
        live: &LiveJob,
        key: Option<&IdempotencyKey>,
        webhook: Option<&str>,
        gateway: &str,
    ) -> JobRecord {
        JobRecord {
            id: row.id.clone(),
            client: row.client.clone(),
            attached: row.attached,
            api: live.api,
            request: row.request.clone(),
            model: String::new(),
            hash: None,
            cost: live.cost,
            priority: live.priority,
            state: JobState::Queued,
            sequence: 0,
            submission: String::new(),
            rank: None,
            created: row.created,
            started: None,
            finished: None,
            attempts: 0,
            kills: 0,
            suspects: Vec::new(),
            losses: 0,
            failures: 0,
            failed_on: Vec::new(),
            history: Vec::new(),
            error: None,
            notes: Vec::new(),
            worker: None,
            ticket: None,
            ticket_stored: None,
            began: false,
            cancel: false,
            stop_at_preview: false,
            gateway: gateway.to_owned(),
            key: key.map(|key| (key.key.clone(), key.fingerprint.clone())),
            webhook: webhook.map(str::to_owned),
            trace: live.trace.map(|trace| trace.to_string()),
        }
    }

    pub(crate) fn record_key(id: &str) -> String {
        format!("job.{id}")
    }

    /// Its place among the jobs of its client.
    pub(crate) fn place(&self) -> u64 {
        self.rank.unwrap_or(self.sequence)
    }

    /// Returns it to the queue.
    pub(crate) fn return_to_queue(&mut self) {
        self.state = JobState::Queued;
        (self.worker, self.ticket, self.ticket_stored, self.started) = (None, None, None, None);
        self.began = false;
    }

    /// The ticket that it runs with, or ran with.
    pub(crate) fn ticket_id(&self) -> Option<TicketId> {
        Some(TicketId { stored: self.ticket_stored?, sequence: self.ticket? })
    }

    pub(crate) fn set_ticket(&mut self, ticket: TicketId) {
        (self.ticket, self.ticket_stored) = (Some(ticket.sequence), Some(ticket.stored));
    }

    /// Whether it is to run alone: it may be what its workers died of.
    pub(crate) fn is_suspected(&self) -> bool {
        !self.suspects.is_empty() || self.kills > 0 || self.losses > 0
    }

    /// A queued job for tests of the rules.
    #[cfg(test)]
    pub(crate) fn test(id: &str) -> JobRecord {
        let job = serde_json::json!({
            "id": id, "client": "x", "attached": false, "api": "jobs", "model": "small", "cost": 1.0,
            "state": "queued", "created": 0, "gateway": "x", "request": { "prompt": "a" },
        });
        serde_json::from_value(job).unwrap()
    }

    pub(crate) fn row(&self) -> JobRow {
        JobRow {
            id: self.id.clone(),
            client: self.client.clone(),
            attached: self.attached,
            priority: self.priority,
            request: self.request.clone(),
            unreadable: None,
            state: self.state,
            attempts: self.attempts,
            created: self.created,
            started: self.started,
            finished: self.finished,
            error: self.error.clone().filter(|_| self.state.is_final()),
            notes: self.notes.clone(),
        }
    }
}

/// An image, in `image.ID`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ImageRecord {
    pub(crate) id: String,
    pub(crate) job: String,
    pub(crate) number: u32,
    pub(crate) created: i64,
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) seed: Option<String>,
    /// The SHA-256 of its file, and the extension.
    pub(crate) file: String,
    pub(crate) bytes: u64,
    pub(crate) prompt: String,
    pub(crate) model: String,
    pub(crate) recipe: String,
    /// Who generated it, and the ticket that it was generated with.
    pub(crate) worker: String,
    pub(crate) ticket: u64,
}

impl ImageRecord {
    pub(crate) fn new(row: &ImageRow, worker: &str, ticket: u64) -> ImageRecord {
        ImageRecord {
            id: row.id.clone(),
            job: row.job.clone(),
            number: row.number,
            created: row.created,
            width: row.width,
            height: row.height,
            seed: row.seed.clone(),
            file: row.file.clone(),
            bytes: row.bytes,
            prompt: row.prompt.clone(),
            model: row.model.clone(),
            recipe: row.recipe.clone(),
            worker: worker.to_owned(),
            ticket,
        }
    }

    pub(crate) fn row(self, request: &Request) -> ImageRow {
        ImageRow {
            id: self.id,
            job: self.job,
            number: self.number,
            created: self.created,
            width: self.width,
            height: self.height,
            seed: self.seed,
            file: self.file,
            bytes: self.bytes,
            prompt: self.prompt,
            model: self.model,
            request: request.clone(),
            recipe: self.recipe,
            favourite: false,
            trashed: None,
        }
    }
}

/// The marks of an image, in `mark.ID`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MarkRecord {
    pub(crate) favourite: bool,
    pub(crate) trashed: Option<i64>,
}

/// Who stored an input, in `input.HASH.CLIENT`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct InputRecord {
    pub(crate) hash: String,
    pub(crate) client: String,
    pub(crate) bytes: u64,
    pub(crate) used: i64,
}

impl InputRecord {
    pub(crate) fn record_key(hash: &str, client: &str) -> String {
        format!("input.{hash}.{}", &hex(Sha256::digest(client))[..24])
    }
}

//! A job: what a client asks for, and what has become of it. This is also the form in which a job is stored and sent: the
//! database has the columns that a server alone needs, the records of a fleet are this as JSON.

use std::sync::OnceLock;

use kiln_engine::Request;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::jobs::error::{JobError, read_error, write_error};
use crate::jobs::priority::Priority;
use crate::jobs::store::now;
use crate::jobs::traces::TraceContext;

/// The state of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// Waiting in the queue.
    #[default]
    Queued,
    /// Being generated.
    Running,
    /// Finished; the images are available.
    Done,
    /// Ended with an error.
    Failed,
    /// Cancelled by a client.
    Cancelled,
}

impl JobState {
    /// Whether the job has ended.
    pub fn is_final(self) -> bool {
        !matches!(self, JobState::Queued | JobState::Running)
    }

    /// The name used in JSON and in the database.
    pub fn name(self) -> &'static str {
        match self {
            JobState::Queued => "queued",
            JobState::Running => "running",
            JobState::Done => "done",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }

    pub(crate) fn parse(name: &str) -> JobState {
        match name {
            "queued" => JobState::Queued,
            "running" => JobState::Running,
            "done" => JobState::Done,
            "cancelled" => JobState::Cancelled,
            _ => JobState::Failed,
        }
    }
}

/// The API a job was submitted through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Api {
    #[default]
    Jobs,
    OpenAi,
    A1111,
}

/// A job. Fields that it gets after its submission, and those that are younger than the first records, may be absent in JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) id: String,
    /// The client that submitted it.
    pub(crate) client: String,
    /// A client waits for it on an open connection; it is not resumed after a restart.
    pub(crate) attached: bool,
    pub(crate) api: Api,
    /// The request; empty if it is `unreadable`.
    pub(crate) request: Request,
    /// Why the stored request can't be read.
    #[serde(skip)]
    pub(crate) unreadable: Option<String>,
    /// Estimated work.
    pub(crate) cost: f64,
    #[serde(default)]
    pub(crate) priority: Priority,
    /// Its state as it is stored. A [`LiveJob`](crate::jobs::live::LiveJob) has a newer one in its snapshot.
    pub(crate) state: JobState,
    /// When it was submitted, in milliseconds since 1970.
    pub(crate) created: i64,
    /// When it was last started.
    #[serde(default)]
    pub(crate) started: Option<i64>,
    /// When it ended.
    #[serde(default)]
    pub(crate) finished: Option<i64>,
    /// How often it was started.
    #[serde(default)]
    pub(crate) attempts: u32,
    /// Its last error.
    #[serde(flatten, serialize_with = "write_error", deserialize_with = "read_error")]
    pub(crate) error: Option<JobError>,
    /// Messages about it.
    #[serde(default)]
    pub(crate) notes: Vec<String>,
    /// Its idempotency key, and the hash of its request.
    #[serde(default)]
    pub(crate) key: Option<(String, String)>,
    /// The URL to call at its end.
    #[serde(default)]
    pub(crate) webhook: Option<String>,
    /// Its submission in its trace.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "write_trace",
        deserialize_with = "read_trace"
    )]
    pub(crate) trace: Option<TraceContext>,
    /// The process died while it was running: run it alone, so that it can't take another job down with it.
    #[serde(skip)]
    pub(crate) run_alone: bool,
    /// What a fleet knows of it.
    #[serde(flatten)]
    pub(crate) fleet: FleetPart,
    /// The keys of its group and its batch.
    #[serde(skip)]
    pub(crate) keys: OnceLock<(String, String)>,
}

/// The part of a job that only fleets use: which workers it is for, and who has it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct FleetPart {
    /// The model: the default one if the request names none.
    pub(crate) model: String,
    /// The hash of the model's weights, as the gateway knew it.
    #[serde(default)]
    pub(crate) hash: Option<String>,
    /// The gateway that accepted it.
    pub(crate) gateway: String,
    /// Its place in the order of submission, which its gateway numbers.
    #[serde(default)]
    pub(crate) sequence: u64,
    /// Set if its client reordered its jobs: the sequence of the job whose place it has.
    #[serde(default)]
    pub(crate) rank: Option<u64>,
    /// Tells a submission apart from another one with the same idempotency key.
    #[serde(default)]
    pub(crate) submission: String,
    /// Who runs it, or ran it last.
    #[serde(default)]
    pub(crate) worker: Option<String>,
    /// The sequence of the ticket that it runs with, or ran with.
    #[serde(default)]
    pub(crate) ticket: Option<u64>,
    /// When that ticket was stored.
    #[serde(default)]
    pub(crate) ticket_stored: Option<i64>,
    /// Whether its worker has begun to generate it.
    #[serde(default)]
    pub(crate) began: bool,
    /// Whether its worker is to cancel it.
    #[serde(default)]
    pub(crate) cancel: bool,
    /// Whether it is to stop at its next preview.
    #[serde(default)]
    pub(crate) stop_at_preview: bool,
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
}

impl Job {
    /// The hash of its request, if it has an idempotency key.
    pub(crate) fn fingerprint(&self) -> Option<&str> {
        self.key.as_ref().map(|(_, fingerprint)| fingerprint.as_str())
    }

    /// Its place among the jobs of its client.
    pub(crate) fn place(&self) -> u64 {
        self.fleet.rank.unwrap_or(self.fleet.sequence)
    }

    /// Whether it is to run alone: it may be what processes died of.
    pub(crate) fn runs_alone(&self) -> bool {
        self.run_alone || !self.fleet.suspects.is_empty() || self.fleet.kills > 0 || self.fleet.losses > 0
    }

    /// The number of images it asks for.
    pub(crate) fn images(&self) -> u32 {
        u32::try_from(self.request.image_count()).unwrap_or(u32::MAX)
    }

    /// Equal for two jobs that can run one after the other without loading anything.
    pub(crate) fn group_key(&self) -> &str {
        &self.keys().0
    }

    /// Equal for two jobs that can be generated in one batch, as far as the request tells; the generator checks again.
    /// `None` for one that must run alone.
    pub(crate) fn batch_key(&self) -> Option<&str> {
        (!self.runs_alone()).then(|| self.keys().1.as_str())
    }

    fn keys(&self) -> &(String, String) {
        self.keys.get_or_init(|| {
            let request = &self.request;
            let loras: Vec<_> = request.loras.iter().map(|lora| (&lora.path, lora.weight)).collect();
            let size = (request.width, request.height, request.references.len(), request.init.is_some());
            let group = format!("{:?}", (&request.model, loras, request.dora_rule, &request.vae, size));
            (group, request.batch_key())
        })
    }

    /// It with an end that is not stored yet.
    pub(crate) fn with_end(mut self, end: Option<JobEnd>) -> Job {
        if let Some(end) = end {
            (self.state, self.error, self.notes) = (end.state, end.error, end.notes);
            self.finished = Some(end.finished);
        }
        self
    }
}

fn write_trace<S: Serializer>(trace: &Option<TraceContext>, serializer: S) -> Result<S::Ok, S::Error> {
    trace.map(|trace| trace.to_string()).serialize(serializer)
}

/// Reads a trace; one of another version is none.
fn read_trace<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TraceContext>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.as_deref().and_then(TraceContext::parse))
}

/// How a job ended.
#[derive(Clone, Debug)]
pub(crate) struct JobEnd {
    pub(crate) id: String,
    pub(crate) state: JobState,
    pub(crate) error: Option<JobError>,
    pub(crate) notes: Vec<String>,
    /// In milliseconds since 1970.
    pub(crate) finished: i64,
}

impl JobEnd {
    /// The end of a job that failed or was cancelled before it could run.
    pub(crate) fn unstarted(id: &str, error: JobError) -> JobEnd {
        let state = if error.is_cancelled() { JobState::Cancelled } else { JobState::Failed };
        JobEnd { id: id.to_owned(), state, error: Some(error), notes: Vec::new(), finished: now() }
    }
}

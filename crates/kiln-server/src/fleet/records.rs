//! The records of a fleet as JSON, and how they become rows of the database.

use kiln_base::hex;
use kiln_engine::Request;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::jobs::job::{Job, JobState};
use crate::jobs::store::ImageRow;

/// A ticket: its sequence on the stream, and when it was stored. A stream that was deleted and created again numbers its
/// messages anew, but at other times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TicketId {
    /// In nanoseconds since 1970.
    pub(crate) stored: i64,
    pub(crate) sequence: u64,
}

/// What a fleet does with a job, in its ticket and in `job.ID`.
impl Job {
    pub(crate) fn record_key(id: &str) -> String {
        format!("job.{id}")
    }

    /// Returns it to the queue.
    pub(crate) fn return_to_queue(&mut self) {
        self.state = JobState::Queued;
        self.started = None;
        let fleet = &mut self.fleet;
        (fleet.worker, fleet.ticket, fleet.ticket_stored, fleet.began) = (None, None, None, false);
    }

    /// The ticket that it runs with, or ran with.
    pub(crate) fn ticket_id(&self) -> Option<TicketId> {
        Some(TicketId { stored: self.fleet.ticket_stored?, sequence: self.fleet.ticket? })
    }

    pub(crate) fn set_ticket(&mut self, ticket: TicketId) {
        (self.fleet.ticket, self.fleet.ticket_stored) = (Some(ticket.sequence), Some(ticket.stored));
    }

    /// A queued job for tests of the rules.
    #[cfg(test)]
    pub(crate) fn test(id: &str) -> Job {
        let job = serde_json::json!({
            "id": id, "client": "x", "attached": false, "api": "jobs", "model": "small", "cost": 1.0,
            "state": "queued", "created": 0, "gateway": "x", "request": { "prompt": "a" },
        });
        serde_json::from_value(job).unwrap()
    }
}

/// An image, in `image.ID`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ImageRecord {
    #[serde(flatten, with = "RecordedRow")]
    pub(crate) row: ImageRow,
    /// Who generated it, and the ticket that it was generated with.
    pub(crate) worker: String,
    pub(crate) ticket: u64,
}

/// What the record of an image has of its row: the request is in the record of its job, the marks are in one of their own.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ImageRow")]
struct RecordedRow {
    id: String,
    job: String,
    number: u32,
    created: i64,
    width: u32,
    height: u32,
    seed: Option<String>,
    /// The SHA-256 of its file, and the extension.
    file: String,
    bytes: u64,
    prompt: String,
    model: String,
    #[serde(skip)]
    request: Request,
    recipe: String,
    #[serde(skip)]
    favourite: bool,
    #[serde(skip)]
    trashed: Option<i64>,
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

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn records_of_an_earlier_version_are_read_and_keep_all_they_say() {
        let lines: Vec<Value> = include_str!("../../tests/data/earlier/records.jsonl")
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 5);
        for line in lines {
            let record = &line["record"];
            let written = match line["kind"].as_str() {
                Some("image") => serde_json::to_value(ImageRecord::deserialize(record).unwrap()),
                _ => serde_json::to_value(Job::deserialize(record).unwrap()),
            };
            let written = written.unwrap();
            for (name, value) in record.as_object().unwrap() {
                assert_eq!(&written[name], value, "{name}");
            }
        }
    }
}

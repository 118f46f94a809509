//! The bucket of records: reading, and writing by compare-and-set.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use async_nats::jetstream::kv::{Entry, Operation, UpdateErrorKind};
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use bytes::Bytes;
use serde::Serialize;

use super::error::Result;
use super::link::{Failure, Link};

/// The key of the record that is written to see whether records can be written, and to learn the last revision.
pub(super) const FENCE: &str = "fence";
/// The header of a record that says what was done to it.
const KV_OPERATION: &str = "KV-Operation";

/// The outcome of a compare-and-set write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOutcome {
    /// It is stored as this revision.
    Revision(u64),
    /// The record has changed, or exists already.
    Conflict,
}

impl Link {
    /// Reads a record; `None` if there never was one. Asks the leader: another server's copy may be an old one.
    pub(super) async fn entry(&self, key: &str) -> Result<Option<Record>> {
        let subject = format!("{}{key}", self.state.prefix);
        self.retry("reading a record", || async {
            match self.state.stream.get_last_raw_message_by_subject(&subject).await {
                Ok(message) => {
                    let operation = message.headers.get(KV_OPERATION).map(|operation| operation.as_str());
                    let is_present = !matches!(operation, Some("DEL" | "PURGE"));
                    Ok(Some(Record { revision: message.sequence, value: message.payload, is_present }))
                }
                Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
                Err(error) => Err(Failure::retry(error)),
            }
        })
        .await
    }

    /// Creates a record, also in place of one that was deleted.
    pub(super) async fn create(&self, key: &str, value: &impl Serialize) -> Result<WriteOutcome> {
        match self.update(key, value, 0).await? {
            WriteOutcome::Conflict => match self.entry(key).await? {
                Some(deleted) if !deleted.is_present => self.update(key, value, deleted.revision).await,
                _ => Ok(WriteOutcome::Conflict),
            },
            created => Ok(created),
        }
    }

    /// Changes a record that has this revision; 0 creates it.
    pub(super) async fn update(
        &self,
        key: &str,
        value: &impl Serialize,
        revision: u64,
    ) -> Result<WriteOutcome> {
        let value = json(value);
        let is_first = AtomicBool::new(true);
        self.retry("changing a record", || async {
            let is_first = is_first.swap(false, SeqCst);
            match self.state.update(key, value.clone(), revision).await {
                Ok(revision) => Ok(WriteOutcome::Revision(revision)),
                Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => {
                    // After a try whose answer was lost, the conflict may be with that one.
                    let stored =
                        if is_first { None } else { self.entry(key).await.map_err(Failure::retry)? };
                    Ok(match stored {
                        Some(stored) if stored.value == value => WriteOutcome::Revision(stored.revision),
                        _ => WriteOutcome::Conflict,
                    })
                }
                Err(error) => Err(Failure::retry(error)),
            }
        })
        .await
    }

    /// Writes something; every record with a lower revision was written before this call, or during it.
    pub(super) async fn fence(&self) -> Result<u64> {
        self.put(FENCE, &self.id).await
    }

    /// Writes a record, whatever its revision.
    pub(super) async fn put(&self, key: &str, value: &impl Serialize) -> Result<u64> {
        let value = json(value);
        self.retry("writing a record", || async {
            self.state.put(key, value.clone()).await.map_err(Failure::retry)
        })
        .await
    }

    /// Deletes a record; a delete marker stays.
    pub(super) async fn delete(&self, key: &str) -> Result<()> {
        self.retry("deleting a record", || async { self.state.delete(key).await.map_err(Failure::retry) })
            .await
    }

    /// The last revision of the bucket.
    pub(super) async fn last_revision(&self) -> Result<u64> {
        self.retry("reading the last revision", || async {
            let info = self.state.stream.get_info().await.map_err(Failure::retry)?;
            Ok(info.state.last_sequence)
        })
        .await
    }
}

/// A record as it is stored.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) revision: u64,
    pub(super) value: Bytes,
    /// Whether it is the record itself, not a marker of its deletion.
    pub(super) is_present: bool,
}

/// Whether an entry is the record itself, not a marker of its deletion.
pub(super) fn is_present(entry: &Entry) -> bool {
    entry.operation == Operation::Put
}

fn json(value: &impl Serialize) -> Bytes {
    // Records hold only strings, numbers and lists.
    serde_json::to_vec(value).unwrap_or_default().into()
}

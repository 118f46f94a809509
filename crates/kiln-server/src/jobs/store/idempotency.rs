//! Idempotency keys: a request that is sent again returns the job of the first one.

use std::time::Duration;

use kiln_base::hex;
use rusqlite::{Connection, OptionalExtension, params};
use sha2::{Digest, Sha256};

use super::{Store, StoreError, now};
use crate::jobs::job::Job;

/// How long a key is remembered.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// The key of a request, and a hash of the request.
#[derive(Clone, Debug)]
pub(crate) struct IdempotencyKey {
    pub(crate) client: String,
    pub(crate) key: String,
    pub(crate) fingerprint: String,
}

impl IdempotencyKey {
    /// The key of a job.
    pub(super) fn of(job: &Job) -> Option<IdempotencyKey> {
        let (key, fingerprint) = job.key.clone()?;
        Some(IdempotencyKey { client: job.client.clone(), key, fingerprint })
    }

    /// The id of its job in a fleet: the same wherever it is submitted again.
    pub(crate) fn job_id(&self) -> String {
        let hash = Sha256::new().chain_update(&self.client).chain_update([0]).chain_update(&self.key);
        hex(&hash.finalize()[..12])
    }

    /// The job that was submitted with this key, and its request's hash.
    pub(super) fn find(&self, db: &Connection) -> rusqlite::Result<Option<(String, String)>> {
        let oldest = now() - LIFETIME.as_millis() as i64;
        db.query_row(
            "SELECT job, fingerprint FROM idempotency WHERE client = ? AND key = ? AND created > ?",
            params![self.client, self.key, oldest],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .optional()
    }

    pub(super) fn insert(&self, db: &Connection, job: &Job) -> rusqlite::Result<()> {
        db.execute(
            "INSERT OR REPLACE INTO idempotency (client, key, fingerprint, job, created) VALUES (?, ?, ?, ?, ?)",
            params![self.client, self.key, self.fingerprint, job.id, job.created],
        )?;
        Ok(())
    }
}

impl Store {
    /// The job that was submitted with this key, and its request's hash.
    pub(crate) fn job_of_key(&self, key: &IdempotencyKey) -> Result<Option<(String, String)>, StoreError> {
        Ok(key.find(&self.reader())?)
    }
}

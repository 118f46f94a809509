//! Who stored which input image, and how much of it a client may keep.

use std::fs;

use rusqlite::{Connection, TransactionBehavior, params};

use super::{INPUT_PREFIX, InputFiles, StoreError, now};

/// An input is needed by a job that has not ended.
const IN_USE: &str = "EXISTS (SELECT 1 FROM job_inputs JOIN jobs ON jobs.id = job_inputs.job
    WHERE job_inputs.input = inputs.hash AND jobs.state IN ('queued', 'running'))";

/// What came of a claim.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The client may keep it. These inputs made room for it; their files are deleted.
    Granted { evicted: Vec<String> },
    /// It is larger than what the client may keep beside the inputs of its unfinished jobs.
    QuotaFull,
}

impl InputFiles<'_> {
    /// The hash in an input's name.
    pub(crate) fn hash(name: &str) -> &str {
        hash(name)
    }

    /// Claims an input of this size for a client, before its file is written. Where the client would have more than
    /// `quota` bytes, its inputs that were used longest ago go, except those of unfinished jobs.
    pub(crate) fn claim(
        &self,
        name: &str,
        client: &str,
        bytes: u64,
        quota: u64,
    ) -> Result<Claim, StoreError> {
        let hash = hash(name);
        let mut db = self.0.writer()?;
        let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let used = "UPDATE inputs SET used = ? WHERE hash = ? AND client = ?";
        let mut evicted = Vec::new();
        if transaction.execute(used, params![now(), hash, client])? == 0 {
            if !make_room(&transaction, client, quota.checked_sub(bytes), &mut evicted)? {
                return Ok(Claim::QuotaFull);
            }
            transaction.execute(
                "INSERT INTO inputs (hash, client, bytes, used) VALUES (?, ?, ?, ?)",
                params![hash, client, bytes as i64, now()],
            )?;
        }
        // Files that another client claimed stay.
        evicted.retain(|hash| !is_claimed(&transaction, hash).unwrap_or(true));
        transaction.commit()?;
        for hash in &evicted {
            let _ = fs::remove_file(self.file_path(hash));
        }
        let evicted = evicted.into_iter().map(|hash| format!("{INPUT_PREFIX}{hash}")).collect();
        Ok(Claim::Granted { evicted })
    }

    /// Notes that a client uses an input that it claimed.
    pub(crate) fn touch(&self, name: &str, client: &str) -> Result<(), StoreError> {
        let used = "UPDATE inputs SET used = ? WHERE hash = ? AND client = ?";
        self.0.execute(used, params![now(), hash(name), client])
    }

    /// Deletes all claims to an input whose file is gone.
    pub(crate) fn release(&self, name: &str) -> Result<(), StoreError> {
        self.0.execute("DELETE FROM inputs WHERE hash = ?", [hash(name)])
    }

    /// Whether a client has claimed this input.
    pub(crate) fn is_claimed_by(&self, name: &str, client: &str) -> Result<bool, StoreError> {
        let db = self.0.reader();
        let mut query = db.prepare("SELECT 1 FROM inputs WHERE hash = ? AND client = ?")?;
        Ok(query.exists([hash(name), client])?)
    }
}

fn hash(name: &str) -> &str {
    name.strip_prefix(INPUT_PREFIX).unwrap_or(name)
}

fn is_claimed(db: &Connection, hash: &str) -> rusqlite::Result<bool> {
    db.prepare("SELECT 1 FROM inputs WHERE hash = ?")?.exists([hash])
}

/// Deletes a client's claims until at most `most` bytes are left; returns whether that worked.
fn make_room(
    db: &Connection,
    client: &str,
    most: Option<u64>,
    evicted: &mut Vec<String>,
) -> rusqlite::Result<bool> {
    let Some(most) = most else { return Ok(false) };
    let sum = "SELECT coalesce(sum(bytes), 0) FROM inputs WHERE client = ?";
    let mut stored = db.query_row(sum, [client], |row| row.get::<_, i64>(0))?.max(0) as u64;
    let oldest = format!("SELECT hash, bytes FROM inputs WHERE client = ? AND NOT {IN_USE} ORDER BY used");
    let mut oldest = db.prepare(&oldest)?;
    let mut rows = oldest.query([client])?;
    while stored > most {
        let Some(row) = rows.next()? else { return Ok(false) };
        evicted.push(row.get(0)?);
        stored = stored.saturating_sub(row.get::<_, i64>(1)?.max(0) as u64);
    }
    for hash in &*evicted {
        db.execute("DELETE FROM inputs WHERE hash = ? AND client = ?", [hash.as_str(), client])?;
    }
    Ok(true)
}

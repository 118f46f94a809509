//! The database's tables, and how databases of earlier versions become today's.

use rusqlite::{Connection, TransactionBehavior};

use super::StoreError;

/// Statements that lead from each version to the next: version 0 is an empty database. Statements that were released
/// never change; a change of the tables is a new entry.
const MIGRATIONS: &[&str] = &[TABLES, NOTES_KEYS_WEBHOOKS, MARKS, RANKS, PLOTS, OWNERS, PRIORITIES];

const NOTES_KEYS_WEBHOOKS: &str = "
ALTER TABLE jobs ADD COLUMN notes TEXT;
CREATE TABLE idempotency (
    client TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    created INTEGER NOT NULL,
    PRIMARY KEY (client, key)
);
CREATE INDEX idempotency_job ON idempotency (job);
CREATE TABLE webhooks (
    job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    url TEXT NOT NULL
);
";

/// The priority of a job: above 0 before others, below 0 after them.
const PRIORITIES: &str = "ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;";

/// Who stored which input, and browser sessions.
const OWNERS: &str = "
CREATE TABLE inputs (
    hash TEXT NOT NULL,
    client TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    used INTEGER NOT NULL,
    PRIMARY KEY (hash, client)
) WITHOUT ROWID;
CREATE INDEX inputs_client ON inputs (client, used);
INSERT OR IGNORE INTO inputs SELECT input, client, 0, created FROM job_inputs JOIN jobs ON jobs.id = job;
CREATE INDEX jobs_client ON jobs (client);
CREATE TABLE sessions (
    hash BLOB PRIMARY KEY,
    key TEXT NOT NULL,
    proof BLOB NOT NULL,
    expires INTEGER NOT NULL
) WITHOUT ROWID;
";

const TABLES: &str = "
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    client TEXT NOT NULL,
    attached INTEGER NOT NULL,
    request TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    created INTEGER NOT NULL,
    started INTEGER,
    finished INTEGER,
    error_code TEXT,
    error TEXT
);
CREATE INDEX IF NOT EXISTS jobs_state ON jobs (state);
CREATE TABLE IF NOT EXISTS job_inputs (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    input TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS job_inputs_job ON job_inputs (job);
CREATE INDEX IF NOT EXISTS job_inputs_input ON job_inputs (input);
CREATE TABLE IF NOT EXISTS pictures (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    job TEXT NOT NULL,
    number INTEGER NOT NULL,
    created INTEGER NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    seed TEXT,
    file TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    prompt TEXT NOT NULL,
    model TEXT NOT NULL,
    request TEXT NOT NULL,
    recipe TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS pictures_job ON pictures (job);
";

const MARKS: &str = "
CREATE TABLE IF NOT EXISTS marks (
    picture TEXT PRIMARY KEY,
    favourite INTEGER NOT NULL DEFAULT 0,
    trashed INTEGER
);
";

const RANKS: &str = "
CREATE TABLE IF NOT EXISTS job_ranks (
    job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    rank INTEGER NOT NULL
);
";

const PLOTS: &str = "
CREATE TABLE IF NOT EXISTS plots (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    client TEXT NOT NULL,
    created INTEGER NOT NULL,
    axes TEXT NOT NULL,
    jobs TEXT NOT NULL
);
";

fn version(db: &Connection) -> Result<u32, StoreError> {
    Ok(db.query_row("PRAGMA user_version", [], |row| row.get(0))?)
}

/// Refuses a database that a newer version of Kiln wrote.
pub(super) fn check_version(db: &Connection) -> Result<(), StoreError> {
    let (found, known) = (version(db)?, MIGRATIONS.len() as u32);
    if found > known { Err(StoreError::Newer { found, known }) } else { Ok(()) }
}

/// Brings the database to today's version, whole or not at all.
pub(super) fn migrate(db: &Connection) -> Result<(), StoreError> {
    for (found, statements) in MIGRATIONS.iter().enumerate().skip(version(db)? as usize) {
        let transaction = rusqlite::Transaction::new_unchecked(db, TransactionBehavior::Immediate)?;
        transaction.execute_batch(statements)?;
        transaction.pragma_update(None, "user_version", found as u32 + 1)?;
        transaction.commit()?;
    }
    Ok(())
}

//! Persistent state: a SQLite database of jobs and images, and the image files.
//!
//! An image's id is its job's id and its number, so a job that runs again after a crash overwrites its own files and
//! never duplicates an image.
//! A job is stored before its id is returned.

mod files;
mod images;
mod marks;
mod order;
mod plots;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use kiln_base::lock;
use kiln_engine::Request;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::generator::name;
pub(crate) use files::{INPUT_PREFIX, InputFiles, thumbnail_file};
pub use images::{ImageQuery, ImageRow};
pub(crate) use marks::Marks;
pub(crate) use plots::PlotRow;

/// An error of the database or of a file.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database failed.
    #[error("job database error: {0}")]
    Database(#[from] rusqlite::Error),
    /// A file or folder can't be written.
    #[error("can't write `{path}`: {source}")]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The state of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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

    fn parse(name: &str) -> JobState {
        match name {
            "queued" => JobState::Queued,
            "running" => JobState::Running,
            "done" => JobState::Done,
            "cancelled" => JobState::Cancelled,
            _ => JobState::Failed,
        }
    }
}

/// A job in the database.
#[derive(Clone, Debug, PartialEq)]
pub struct JobRow {
    /// Its id.
    pub id: String,
    /// The client that submitted it.
    pub client: String,
    /// A client waits for it on an open connection; it is not resumed after a restart.
    pub attached: bool,
    /// The request.
    pub request: Request,
    /// Its state.
    pub state: JobState,
    /// How often it was started.
    pub attempts: u32,
    /// When it was submitted, in milliseconds since 1970.
    pub created: i64,
    /// When it was last started.
    pub started: Option<i64>,
    /// When it ended.
    pub finished: Option<i64>,
    /// Why it failed: error code and message.
    pub error: Option<(String, String)>,
}

/// The database and the folders beside it.
pub struct Store {
    connection: Mutex<Connection>,
    folder: PathBuf,
    /// Calls of [`Store::clean_up_occasionally`].
    clean_up_calls: AtomicU32,
}

const SCHEMA: &str = "
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
PRAGMA user_version = 1;
";

impl Store {
    /// Opens the data folder; creates it if it doesn't exist.
    pub fn open(folder: &Path) -> Result<Store, StoreError> {
        for path in [folder.to_path_buf(), folder.join("pictures"), folder.join("inputs")] {
            std::fs::create_dir_all(&path).map_err(|source| StoreError::File { path, source })?;
        }
        let connection = Connection::open(folder.join("queue.sqlite"))?;
        connection.busy_timeout(std::time::Duration::from_secs(5))?;
        // Commits survive a crash of the process; a power cut may lose the last ones, without corruption.
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.pragma_update(None, "foreign_keys", "ON")?;
        connection.execute_batch(SCHEMA)?;
        connection.execute_batch(marks::SCHEMA)?;
        connection.execute_batch(order::SCHEMA)?;
        connection.execute_batch(plots::SCHEMA)?;
        Ok(Store {
            connection: Mutex::new(connection),
            folder: folder.to_path_buf(),
            clean_up_calls: AtomicU32::new(0),
        })
    }

    fn db(&self) -> MutexGuard<'_, Connection> {
        lock(&self.connection)
    }

    /// Inserts a new job. Once this returns, the job survives a restart.
    pub fn insert(&self, job: &JobRow) -> Result<(), StoreError> {
        let request = to_json(&job.request);
        let mut db = self.db();
        let transaction = db.transaction()?;
        transaction.execute(
            "INSERT INTO jobs (id, client, attached, request, state, created) VALUES (?, ?, ?, ?, ?, ?)",
            params![job.id, job.client, job.attached, request, job.state.name(), job.created],
        )?;
        for file in job.request.images() {
            let input = name(&file.path);
            let input = input.strip_prefix(INPUT_PREFIX).unwrap_or(input);
            transaction
                .execute("INSERT INTO job_inputs (job, input) VALUES (?, ?)", params![job.id, input])?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Marks a job as running and counts an attempt.
    pub fn start(&self, id: &str) -> Result<(), StoreError> {
        self.db().execute(
            "UPDATE jobs SET state = 'running', attempts = attempts + 1, started = ? WHERE id = ?",
            params![now(), id],
        )?;
        Ok(())
    }

    /// Returns a started job to the queue; the attempt does not count.
    pub fn undo_start(&self, id: &str) -> Result<(), StoreError> {
        self.db().execute(
            "UPDATE jobs SET state = 'queued', attempts = max(attempts - 1, 0), started = NULL WHERE id = ?",
            [id],
        )?;
        Ok(())
    }

    /// Returns a job that an earlier process left unfinished to the queue; its attempts still count.
    pub fn requeue(&self, id: &str) -> Result<(), StoreError> {
        self.db().execute("UPDATE jobs SET state = 'queued', started = NULL WHERE id = ?", [id])?;
        Ok(())
    }

    /// Records the end of a job together with its images.
    pub fn finish(
        &self,
        id: &str,
        state: JobState,
        error: Option<(&str, &str)>,
        images: &[ImageRow],
    ) -> Result<(), StoreError> {
        let mut db = self.db();
        let transaction = db.transaction()?;
        for image in images {
            image.insert(&transaction)?;
        }
        transaction.execute(
            "UPDATE jobs SET state = ?, finished = ?, error_code = ?, error = ? WHERE id = ?",
            params![state.name(), now(), error.map(|e| e.0), error.map(|e| e.1), id],
        )?;
        transaction.commit()?;
        Ok(())
    }

    /// The job with this id.
    pub fn job(&self, id: &str) -> Result<Option<JobRow>, StoreError> {
        let db = self.db();
        let mut query = db.prepare(&format!("{SELECT} WHERE id = ?"))?;
        Ok(query.query_row([id], job_row).optional()?)
    }

    /// The latest jobs, newest first.
    pub fn jobs(&self, limit: u32) -> Result<Vec<JobRow>, StoreError> {
        let db = self.db();
        let mut query = db.prepare(&format!("{SELECT} ORDER BY seq DESC LIMIT ?"))?;
        Ok(query.query_map([limit], job_row)?.collect::<Result<_, _>>()?)
    }

    /// Jobs that an earlier process left unfinished, oldest first.
    pub fn unfinished(&self) -> Result<Vec<JobRow>, StoreError> {
        let db = self.db();
        let mut query =
            db.prepare(&format!("{SELECT} WHERE state IN ('queued', 'running') ORDER BY {}", order::RANK))?;
        Ok(query.query_map([], job_row)?.collect::<Result<_, _>>()?)
    }
}

const SELECT: &str = "SELECT id, client, attached, request, state, attempts, created, started, finished, error_code, error FROM jobs";

fn job_row(row: &Row<'_>) -> rusqlite::Result<JobRow> {
    let error = row.get::<_, Option<String>>(9)?.zip(row.get(10)?);
    Ok(JobRow {
        id: row.get(0)?,
        client: row.get(1)?,
        attached: row.get(2)?,
        request: parse_request(&row.get::<_, String>(3)?),
        state: JobState::parse(&row.get::<_, String>(4)?),
        attempts: row.get(5)?,
        created: row.get(6)?,
        started: row.get(7)?,
        finished: row.get(8)?,
        error,
    })
}

/// A request as JSON. It holds only strings, numbers and lists, so this can't fail.
fn to_json(request: &Request) -> String {
    serde_json::to_string(request).unwrap_or_default()
}

/// Parses a stored request; returns an empty one if that fails.
fn parse_request(json: &str) -> Request {
    serde_json::from_str(json).unwrap_or_default()
}

/// Milliseconds since 1970.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

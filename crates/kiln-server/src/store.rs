//! What outlives the process: jobs, the images made for them, and the files of both.
//!
//! An image's name is its job's and its number, so that a job which is run again after a crash overwrites its own files
//! and never doubles an image.

mod files;
mod pictures;

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
pub(crate) use files::{Inputs, thumbnail};
pub use pictures::{PictureRow, Search};

/// Why something could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database.
    #[error("the queue's database can't be used: {0}")]
    Database(#[from] rusqlite::Error),
    /// A file.
    #[error("can't write `{path}`: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
}

/// The state of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It waits for its turn.
    #[default]
    Queued,
    /// Its images are being made.
    Running,
    /// Its images are there.
    Done,
    /// It went wrong.
    Failed,
    /// Nobody wanted it any more.
    Cancelled,
}

impl JobState {
    /// Whether nothing will change any more.
    pub fn is_final(self) -> bool {
        !matches!(self, JobState::Queued | JobState::Running)
    }

    /// Its name, as in JSON.
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

/// A job as it is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct JobRow {
    /// Its name.
    pub id: String,
    /// Who asked for it.
    pub client: String,
    /// Somebody waits for it on a connection: of no use after a restart.
    pub attached: bool,
    /// What is asked for.
    pub request: Request,
    /// How it stands.
    pub state: JobState,
    /// How often it was begun.
    pub attempts: u32,
    /// When it came, in milliseconds since 1970.
    pub created: i64,
    /// When it was begun.
    pub started: Option<i64>,
    /// When it ended.
    pub finished: Option<i64>,
    /// Why it failed: a code and a sentence.
    pub error: Option<(String, String)>,
}

/// The database and the folders beside it.
pub struct Store {
    connection: Mutex<Connection>,
    folder: PathBuf,
    untidy: AtomicU32,
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
    /// Opens the folder, which is made if it is not there.
    pub fn open(folder: &Path) -> Result<Store, StoreError> {
        for part in [folder.to_path_buf(), folder.join("pictures"), folder.join("inputs")] {
            std::fs::create_dir_all(&part).map_err(|source| StoreError::File { path: part, source })?;
        }
        let connection = Connection::open(folder.join("queue.sqlite"))?;
        connection.busy_timeout(std::time::Duration::from_secs(5))?;
        // A commit survives the end of the process; a power cut may take the last ones, and no more.
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.pragma_update(None, "foreign_keys", "ON")?;
        connection.execute_batch(SCHEMA)?;
        Ok(Store {
            connection: Mutex::new(connection),
            folder: folder.to_path_buf(),
            untidy: AtomicU32::new(0),
        })
    }

    fn db(&self) -> MutexGuard<'_, Connection> {
        // A panic between two statements leaves the database as it was: transactions are whole or not at lock(&all.self.connection)
    }

    /// Keeps a new job. When this has returned, the job is not lost.
    pub fn insert(&self, job: &JobRow) -> Result<(), StoreError> {
        let request = json(&job.request);
        let mut db = self.db();
        let transaction = db.transaction()?;
        transaction.execute(
            "INSERT INTO jobs (id, client, attached, request, state, created) VALUES (?, ?, ?, ?, ?, ?)",
            params![job.id, job.client, job.attached, request, job.state.name(), job.created],
        )?;
        for file in job.request.images() {
            let input = name(&file.path);
            let input = input.strip_prefix(files::PREFIX).unwrap_or(input);
            transaction
                .execute("INSERT INTO job_inputs (job, input) VALUES (?, ?)", params![job.id, input])?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Notes that a job is begun.
    pub fn begin(&self, id: &str) -> Result<(), StoreError> {
        self.db().execute(
            "UPDATE jobs SET state = 'running', attempts = attempts + 1, started = ? WHERE id = ?",
            params![now(), id],
        )?;
        Ok(())
    }

    /// Puts a job that was begun back into the queue; it counts as not begun.
    pub fn put_back(&self, id: &str) -> Result<(), StoreError> {
        self.db().execute(
            "UPDATE jobs SET state = 'queued', attempts = max(attempts - 1, 0), started = NULL WHERE id = ?",
            [id],
        )?;
        Ok(())
    }

    /// Puts a job that an earlier process left unfinished into the queue.
    pub fn requeue(&self, id: &str) -> Result<(), StoreError> {
        self.db().execute("UPDATE jobs SET state = 'queued', started = NULL WHERE id = ?", [id])?;
        Ok(())
    }

    /// Notes how a job ended, together with its images.
    pub fn finish(
        &self,
        id: &str,
        state: JobState,
        error: Option<(&str, &str)>,
        pictures: &[PictureRow],
    ) -> Result<(), StoreError> {
        let mut db = self.db();
        let transaction = db.transaction()?;
        for picture in pictures {
            picture.insert(&transaction)?;
        }
        transaction.execute(
            "UPDATE jobs SET state = ?, finished = ?, error_code = ?, error = ? WHERE id = ?",
            params![state.name(), now(), error.map(|e| e.0), error.map(|e| e.1), id],
        )?;
        transaction.commit()?;
        Ok(())
    }

    /// A job.
    pub fn job(&self, id: &str) -> Result<Option<JobRow>, StoreError> {
        let db = self.db();
        let mut query = db.prepare(&format!("{SELECT} WHERE id = ?"))?;
        Ok(query.query_row([id], job_row).optional()?)
    }

    /// The latest jobs, newest first.
    pub fn jobs(&self, most: u32) -> Result<Vec<JobRow>, StoreError> {
        let db = self.db();
        let mut query = db.prepare(&format!("{SELECT} ORDER BY seq DESC LIMIT ?"))?;
        Ok(query.query_map([most], job_row)?.collect::<Result<_, _>>()?)
    }

    /// Jobs that an earlier process left unfinished, oldest first.
    pub fn unfinished(&self) -> Result<Vec<JobRow>, StoreError> {
        let db = self.db();
        let mut query = db.prepare(&format!("{SELECT} WHERE state IN ('queued', 'running') ORDER BY seq"))?;
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
        request: request_from(&row.get::<_, String>(3)?),
        state: JobState::parse(&row.get::<_, String>(4)?),
        attempts: row.get(5)?,
        created: row.get(6)?,
        started: row.get(7)?,
        finished: row.get(8)?,
        error,
    })
}

/// Strings, numbers and lists: there is nothing in a request that JSON can't hold.
fn json(request: &Request) -> String {
    serde_json::to_string(request).unwrap_or_default()
}

/// A stored request; an empty one if it can't be read.
fn request_from(json: &str) -> Request {
    serde_json::from_str(json).unwrap_or_default()
}

/// Milliseconds since 1970.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

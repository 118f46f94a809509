//! Persistent state: a SQLite database of jobs and images, and the image files.
//!
//! An image's id is its job's id and its number, so a job that runs again after a crash overwrites its own files and
//! never duplicates an image.
//! A job is stored before its id is returned.

mod files;
mod idempotency;
mod images;
mod inputs;
mod ledger;
mod lock;
mod marks;
mod order;
mod plots;
mod private;
#[cfg(feature = "fleet")]
mod replica;
mod retention;
mod schema;
mod sessions;
mod webhooks;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_base::lock;
use kiln_engine::Request;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use serde::{Deserialize, Serialize};

use crate::generator::name;
use crate::priority::Priority;
pub(crate) use files::{INPUT_PREFIX, InputFiles, thumbnail_file};
pub(crate) use idempotency::IdempotencyKey;
pub use images::{ImageQuery, ImageRow};
pub(crate) use inputs::Claim;
pub(crate) use ledger::{FileKind, Files, Ledger, Local};
pub(crate) use marks::Marks;
pub(crate) use plots::PlotRow;
pub use retention::GalleryLimits;

/// Pages of the write-ahead log that are kept before they go into the database: half a MiB.
const WAL_PAGES: u32 = 128;

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
    /// Another server uses the folder.
    #[error("another server is using it")]
    InUse,
    /// The queue of the fleet can't be used.
    #[error("the queue can't be used: {0}")]
    Queue(String),
    /// No model of a worker can be loaded.
    #[error("no model can be loaded: {0}")]
    Model(String),
    /// A newer version of Kiln wrote the database.
    #[error("its database has version {found}, this version of Kiln knows up to {known}; use the newer Kiln")]
    Newer {
        /// The version of the database.
        found: u32,
        /// The newest version known here.
        known: u32,
    },
}

/// The state of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Its priority.
    pub priority: Priority,
    /// The request; empty if it is `unreadable`.
    pub request: Request,
    /// Why the stored request can't be read.
    pub unreadable: Option<String>,
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
    /// Messages about the job.
    pub notes: Vec<String>,
}

/// How a job ended.
#[derive(Clone, Debug)]
pub(crate) struct JobEnd {
    pub(crate) id: String,
    pub(crate) state: JobState,
    /// Error code and message.
    pub(crate) error: Option<(String, String)>,
    pub(crate) notes: Vec<String>,
    /// In milliseconds since 1970.
    pub(crate) finished: i64,
    /// Whether the job may succeed on another machine: the server failed, not the request.
    #[cfg_attr(not(feature = "fleet"), expect(dead_code, reason = "for fleets"))]
    pub(crate) retry: bool,
}

/// The database's file.
const DATABASE: &str = "queue.sqlite";
/// How long a write waits for another process that has the database locked, such as a backup.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// The database and the folders beside it.
pub struct Store {
    /// For everything that writes.
    writer: Mutex<Connection>,
    /// Reads don't wait for another process that writes.
    reader: Mutex<Connection>,
    folder: PathBuf,
    /// Held as long as the store is open.
    _lock: File,
    /// Calls of [`Store::clean_up_occasionally`].
    clean_up_calls: AtomicU32,
}

impl Store {
    /// Opens the data folder; creates it if it doesn't exist.
    pub fn open(folder: &Path) -> Result<Store, StoreError> {
        for name in ["", "pictures", "inputs", "texts"] {
            let path = folder.join(name);
            // The folders inside are ours, whatever is in them.
            let own_file = if name.is_empty() { DATABASE } else { "." };
            private::create_folder(&path, own_file).map_err(|source| StoreError::File { path, source })?;
        }
        let lock = lock::lock_folder(folder)?;
        let file = folder.join(DATABASE);
        private::create_file(&file).map_err(|source| StoreError::File { path: file.clone(), source })?;
        let writer = Connection::open(&file)?;
        writer.busy_timeout(BUSY_TIMEOUT)?;
        schema::check_version(&writer)?;
        // Commits survive a crash of the process; a power cut may lose the last ones, without corruption.
        writer.pragma_update(None, "journal_mode", "WAL")?;
        writer.pragma_update(None, "synchronous", "NORMAL")?;
        // A short log: on a full disk, what deleted images free is not used up by the deletes themselves.
        writer.pragma_update(None, "wal_autocheckpoint", WAL_PAGES)?;
        writer.pragma_update(None, "foreign_keys", "ON")?;
        schema::migrate(&writer)?;
        let reader = Connection::open(&file)?;
        reader.busy_timeout(BUSY_TIMEOUT)?;
        reader.pragma_update(None, "query_only", "ON")?;
        Ok(Store {
            writer: Mutex::new(writer),
            reader: Mutex::new(reader),
            folder: folder.to_path_buf(),
            _lock: lock,
            clean_up_calls: AtomicU32::new(0),
        })
    }

    /// The connection for reading.
    fn reader(&self) -> MutexGuard<'_, Connection> {
        lock(&self.reader)
    }

    /// The connection for writing. Waiting for it and for another process's lock takes [`BUSY_TIMEOUT`] in all, however
    /// many threads wait.
    fn writer(&self) -> Result<MutexGuard<'_, Connection>, StoreError> {
        let started = Instant::now();
        let connection = lock(&self.writer);
        connection.busy_timeout(BUSY_TIMEOUT.saturating_sub(started.elapsed()))?;
        Ok(connection)
    }

    /// Inserts a new job. Once this returns, the job survives a restart. If an earlier job has the same idempotency key,
    /// that one's id is returned instead, or no id if its request was another one.
    pub(crate) fn insert(
        &self,
        job: &JobRow,
        key: Option<&IdempotencyKey>,
        webhook: Option<&str>,
    ) -> Result<Option<Option<String>>, StoreError> {
        let request = to_json(&job.request);
        let mut db = self.writer()?;
        let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if let Some(key) = key
            && let Some((earlier, fingerprint)) = key.find(&transaction)?
        {
            return Ok(Some(Some(earlier).filter(|_| fingerprint == key.fingerprint)));
        }
        transaction.execute(
            "INSERT INTO jobs (id, client, attached, priority, request, state, created) VALUES (?, ?, ?, ?, ?, ?, ?)",
            params![
                job.id,
                job.client,
                job.attached,
                job.priority.number(),
                request,
                job.state.name(),
                job.created
            ],
        )?;
        for file in job.request.images() {
            let input = name(&file.path);
            let input = input.strip_prefix(INPUT_PREFIX).unwrap_or(input);
            transaction
                .execute("INSERT INTO job_inputs (job, input) VALUES (?, ?)", params![job.id, input])?;
        }
        if let Some(key) = key {
            key.insert(&transaction, &job.id)?;
        }
        if let Some(url) = webhook {
            transaction.execute("INSERT INTO webhooks (job, url) VALUES (?, ?)", params![job.id, url])?;
        }
        transaction.commit()?;
        Ok(None)
    }

    /// Marks a job as running and counts an attempt.
    pub fn start(&self, id: &str) -> Result<(), StoreError> {
        self.writer()?.execute(
            "UPDATE jobs SET state = 'running', attempts = attempts + 1, started = ? WHERE id = ?",
            params![now(), id],
        )?;
        Ok(())
    }

    /// Returns a started job to the queue; the attempt does not count.
    pub fn undo_start(&self, id: &str) -> Result<(), StoreError> {
        self.writer()?.execute(
            "UPDATE jobs SET state = 'queued', attempts = max(attempts - 1, 0), started = NULL WHERE id = ?",
            [id],
        )?;
        Ok(())
    }

    /// Returns a job that an earlier process left unfinished to the queue; its attempts still count.
    pub fn requeue(&self, id: &str) -> Result<(), StoreError> {
        self.writer()?.execute("UPDATE jobs SET state = 'queued', started = NULL WHERE id = ?", [id])?;
        Ok(())
    }

    /// Records the end of a job.
    pub(crate) fn finish(&self, end: &JobEnd) -> Result<(), StoreError> {
        let (code, message) = end.error.as_ref().map(|(code, message)| (code, message)).unzip();
        let notes = (!end.notes.is_empty()).then(|| serde_json::to_string(&end.notes).unwrap_or_default());
        self.writer()?.execute(
            "UPDATE jobs SET state = ?, finished = ?, error_code = ?, error = ?, notes = ? WHERE id = ?",
            params![end.state.name(), end.finished, code, message, notes, end.id],
        )?;
        Ok(())
    }

    /// The job with this id.
    pub fn job(&self, id: &str) -> Result<Option<JobRow>, StoreError> {
        let db = self.reader();
        let mut query = db.prepare(&format!("{SELECT} WHERE id = ?"))?;
        Ok(query.query_row([id], job_row).optional()?)
    }

    /// The latest jobs, newest first; of one client or of all. Fewer if their requests are very long.
    pub fn jobs(&self, limit: u32, client: Option<&str>) -> Result<Vec<JobRow>, StoreError> {
        let db = self.reader();
        let mut query =
            db.prepare(&format!("{SELECT} WHERE ?1 IS NULL OR client = ?1 ORDER BY seq DESC LIMIT ?2"))?;
        let mut rows = query.query(params![client, limit])?;
        let (mut jobs, mut budget) = (Vec::new(), ListBudget::default());
        while let Some(row) = rows.next()?
            && budget.take(row.get_ref(3)?)
        {
            jobs.push(job_row(row)?);
        }
        Ok(jobs)
    }

    /// The client that submitted a job.
    pub fn client_of(&self, id: &str) -> Result<Option<String>, StoreError> {
        let db = self.reader();
        let mut query = db.prepare("SELECT client FROM jobs WHERE id = ?")?;
        Ok(query.query_row([id], |row| row.get(0)).optional()?)
    }

    /// Jobs that an earlier process left unfinished, oldest first.
    pub fn unfinished(&self) -> Result<Vec<JobRow>, StoreError> {
        let db = self.reader();
        let mut query =
            db.prepare(&format!("{SELECT} WHERE state IN ('queued', 'running') ORDER BY {}", order::RANK))?;
        Ok(query.query_map([], job_row)?.collect::<Result<_, _>>()?)
    }
}

/// What a list may hold: a request of long prompts is repeated for each of its images, and a list must not fill the memory.
#[derive(Default)]
struct ListBudget {
    used: usize,
}

impl ListBudget {
    /// Bytes of the requests in a list.
    const MAX: usize = 4 << 20;

    /// Counts a stored request; returns whether there is room for it. The first one always has.
    fn take(&mut self, request: ValueRef<'_>) -> bool {
        let first = self.used == 0;
        self.used += request.as_bytes().map_or(0, <[u8]>::len);
        first || self.used <= ListBudget::MAX
    }
}

const SELECT: &str = "SELECT id, client, attached, request, state, attempts, created, started, finished, error_code, error, notes, priority FROM jobs";

fn job_row(row: &Row<'_>) -> rusqlite::Result<JobRow> {
    let error = row.get::<_, Option<String>>(9)?.zip(row.get(10)?);
    let notes: Option<String> = row.get(11)?;
    let (request, unreadable) = match parse_request(row.get_ref(3)?) {
        Ok(request) => (request, None),
        Err(reason) => (Request::default(), Some(reason)),
    };
    Ok(JobRow {
        id: row.get(0)?,
        client: row.get(1)?,
        attached: row.get(2)?,
        priority: Priority::from_number(row.get(12)?),
        request,
        unreadable,
        state: JobState::parse(&row.get::<_, String>(4)?),
        attempts: row.get(5)?,
        created: row.get(6)?,
        started: row.get(7)?,
        finished: row.get(8)?,
        error,
        notes: notes.and_then(|notes| serde_json::from_str(&notes).ok()).unwrap_or_default(),
    })
}

/// A request as JSON. It holds only strings, numbers and lists, so this can't fail.
fn to_json(request: &Request) -> String {
    serde_json::to_string(request).unwrap_or_default()
}

/// Parses a stored request.
fn parse_request(json: ValueRef<'_>) -> Result<Request, String> {
    let json = json.as_str().map_err(|error| error.to_string())?;
    serde_json::from_str(json).map_err(|error| error.to_string())
}

/// Milliseconds since 1970.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

//! Jobs in the database.

use kiln_engine::Request;
use rusqlite::types::ValueRef;
use rusqlite::{Row, Transaction, params};

use super::idempotency::IdempotencyKey;
use super::{InputFiles, Store, StoreError, now, order};
use crate::jobs::error::JobError;
use crate::jobs::generator::name;
use crate::jobs::job::{Job, JobEnd, JobState};
use crate::jobs::priority::Priority;

impl Store {
    /// Inserts a new job. Once this returns, the job survives a restart. If an earlier job has the same idempotency key,
    /// that one's id is returned instead, or no id if its request was another one.
    pub(crate) fn insert(&self, job: &Job) -> Result<Option<Option<String>>, StoreError> {
        let key = IdempotencyKey::of(job);
        self.transaction(|transaction| {
            if let Some(key) = &key
                && let Some((earlier, fingerprint)) = key.find(transaction)?
            {
                return Ok(Some(Some(earlier).filter(|_| fingerprint == key.fingerprint)));
            }
            put(transaction, job, None)?;
            Ok(None)
        })
    }

    /// Marks a job as running and counts an attempt.
    pub fn start(&self, id: &str) -> Result<(), StoreError> {
        let running = "UPDATE jobs SET state = 'running', attempts = attempts + 1, started = ? WHERE id = ?";
        self.execute(running, params![now(), id])
    }

    /// Returns a started job to the queue; the attempt does not count.
    pub fn undo_start(&self, id: &str) -> Result<(), StoreError> {
        self.execute(
            "UPDATE jobs SET state = 'queued', attempts = max(attempts - 1, 0), started = NULL WHERE id = ?",
            [id],
        )
    }

    /// Returns a job that an earlier process left unfinished to the queue; its attempts still count.
    pub fn requeue(&self, id: &str) -> Result<(), StoreError> {
        self.execute("UPDATE jobs SET state = 'queued', started = NULL WHERE id = ?", [id])
    }

    /// Records the end of a job.
    pub(crate) fn finish(&self, end: &JobEnd) -> Result<(), StoreError> {
        let (code, message) = end.error.as_ref().map(|error| (error.code.name(), &error.message)).unzip();
        self.execute(
            "UPDATE jobs SET state = ?, finished = ?, error_code = ?, error = ?, notes = ? WHERE id = ?",
            params![end.state.name(), end.finished, code, message, notes_json(&end.notes), end.id],
        )
    }

    /// The job with this id.
    pub(crate) fn job(&self, id: &str) -> Result<Option<Job>, StoreError> {
        self.row(&format!("{SELECT} WHERE id = ?"), [id], read_job)
    }

    /// The latest jobs, newest first; of one client or of all. Fewer if their requests are very long.
    pub(crate) fn jobs(&self, limit: u32, client: Option<&str>) -> Result<Vec<Job>, StoreError> {
        let db = self.reader();
        let mut query =
            db.prepare(&format!("{SELECT} WHERE ?1 IS NULL OR client = ?1 ORDER BY seq DESC LIMIT ?2"))?;
        let mut rows = query.query(params![client, limit])?;
        let (mut jobs, mut budget) = (Vec::new(), ListBudget::default());
        while let Some(row) = rows.next()?
            && budget.take(row.get_ref(3)?)
        {
            jobs.push(read_job(row)?);
        }
        Ok(jobs)
    }

    /// The client that submitted a job.
    pub fn client_of(&self, id: &str) -> Result<Option<String>, StoreError> {
        self.row("SELECT client FROM jobs WHERE id = ?", [id], |row| row.get(0))
    }

    /// Jobs that an earlier process left unfinished, oldest first.
    pub(crate) fn unfinished(&self) -> Result<Vec<Job>, StoreError> {
        let sql = format!("{SELECT} WHERE state IN ('queued', 'running') ORDER BY {}", order::RANK);
        self.rows(&sql, [], read_job)
    }
}

/// Writes a job, in place of one with its id; as the last one, or at this place.
pub(super) fn put(transaction: &Transaction<'_>, job: &Job, place: Option<i64>) -> Result<(), StoreError> {
    // A job that is tried again shows no error.
    let error = job.error.as_ref().filter(|_| job.state.is_final());
    let (code, message) = error.map(|error| (error.code.name(), &error.message)).unzip();
    transaction.execute(
        "INSERT INTO jobs (seq, id, client, attached, priority, request, state, attempts, created, started, finished,
         error_code, error, notes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
         ON CONFLICT (id) DO UPDATE SET state = excluded.state, attempts = excluded.attempts,
         started = excluded.started, finished = excluded.finished, error_code = excluded.error_code,
         error = excluded.error, notes = excluded.notes",
        params![
            place,
            job.id,
            job.client,
            job.attached,
            job.priority.number(),
            to_json(&job.request),
            job.state.name(),
            job.attempts,
            job.created,
            job.started,
            job.finished,
            code,
            message,
            notes_json(&job.notes)
        ],
    )?;
    for file in job.request.images() {
        transaction.execute(
            "INSERT INTO job_inputs (job, input) SELECT ?1, ?2
             WHERE NOT EXISTS (SELECT 1 FROM job_inputs WHERE job = ?1 AND input = ?2)",
            params![job.id, InputFiles::hash(name(&file.path))],
        )?;
    }
    if let Some(key) = IdempotencyKey::of(job) {
        key.insert(transaction, job)?;
    }
    match &job.webhook {
        Some(url) => transaction
            .execute("INSERT OR REPLACE INTO webhooks (job, url) VALUES (?, ?)", params![job.id, url])?,
        None => transaction.execute("DELETE FROM webhooks WHERE job = ?", [&job.id])?,
    };
    Ok(())
}

/// Notes as JSON; `None` without any.
fn notes_json(notes: &[String]) -> Option<String> {
    (!notes.is_empty()).then(|| serde_json::to_string(notes).unwrap_or_default())
}

/// What a list may hold: a request of long prompts is repeated for each of its images, and a list must not fill the memory.
#[derive(Default)]
pub(super) struct ListBudget {
    used: usize,
}

impl ListBudget {
    /// Bytes of the requests in a list.
    const MAX: usize = 4 << 20;

    /// Counts a stored request; returns whether there is room for it. The first one always has.
    pub(super) fn take(&mut self, request: ValueRef<'_>) -> bool {
        let first = self.used == 0;
        self.used += request.as_bytes().map_or(0, <[u8]>::len);
        first || self.used <= ListBudget::MAX
    }
}

const SELECT: &str = "SELECT id, client, attached, request, state, attempts, created, started, finished, error_code, error, notes, priority FROM jobs";

fn read_job(row: &Row<'_>) -> rusqlite::Result<Job> {
    let error = row.get::<_, Option<String>>(9)?.zip(row.get(10)?);
    let error = error.map(|(code, message)| JobError::stored(&code, None, message));
    let notes: Option<String> = row.get(11)?;
    let (request, unreadable) = match parse_request(row.get_ref(3)?) {
        Ok(request) => (request, None),
        Err(reason) => (Request::default(), Some(reason)),
    };
    Ok(Job {
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
        ..Job::default()
    })
}

/// A request as JSON. It holds only strings, numbers and lists, so this can't fail.
pub(super) fn to_json(request: &Request) -> String {
    serde_json::to_string(request).unwrap_or_default()
}

/// Parses a stored request.
pub(super) fn parse_request(json: ValueRef<'_>) -> Result<Request, String> {
    let json = json.as_str().map_err(|error| error.to_string())?;
    serde_json::from_str(json).map_err(|error| error.to_string())
}

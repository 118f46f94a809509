//! Jobs in the database.

use kiln_engine::Request;
use rusqlite::types::ValueRef;
use rusqlite::{OptionalExtension, Row, TransactionBehavior, params};

use super::files::INPUT_PREFIX;
use super::idempotency::IdempotencyKey;
use super::{Store, StoreError, now, order};
use crate::jobs::error::JobError;
use crate::jobs::generator::name;
use crate::jobs::job::{Job, JobEnd, JobState};
use crate::jobs::priority::Priority;

impl Store {
    /// Inserts a new job. Once this returns, the job survives a restart. If an earlier job has the same idempotency key,
    /// that one's id is returned instead, or no id if its request was another one.
    pub(crate) fn insert(&self, job: &Job) -> Result<Option<Option<String>>, StoreError> {
        let key = IdempotencyKey::of(job);
        let request = to_json(&job.request);
        let mut db = self.writer()?;
        let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if let Some(key) = &key
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
        if let Some(url) = &job.webhook {
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
        let (code, message) = end.error.as_ref().map(|error| (error.code.name(), &error.message)).unzip();
        let notes = (!end.notes.is_empty()).then(|| serde_json::to_string(&end.notes).unwrap_or_default());
        self.writer()?.execute(
            "UPDATE jobs SET state = ?, finished = ?, error_code = ?, error = ?, notes = ? WHERE id = ?",
            params![end.state.name(), end.finished, code, message, notes, end.id],
        )?;
        Ok(())
    }

    /// The job with this id.
    pub(crate) fn job(&self, id: &str) -> Result<Option<Job>, StoreError> {
        let db = self.reader();
        let mut query = db.prepare(&format!("{SELECT} WHERE id = ?"))?;
        Ok(query.query_row([id], read_job).optional()?)
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
        let db = self.reader();
        let mut query = db.prepare("SELECT client FROM jobs WHERE id = ?")?;
        Ok(query.query_row([id], |row| row.get(0)).optional()?)
    }

    /// Jobs that an earlier process left unfinished, oldest first.
    pub(crate) fn unfinished(&self) -> Result<Vec<Job>, StoreError> {
        let db = self.reader();
        let mut query =
            db.prepare(&format!("{SELECT} WHERE state IN ('queued', 'running') ORDER BY {}", order::RANK))?;
        Ok(query.query_map([], read_job)?.collect::<Result<_, _>>()?)
    }
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

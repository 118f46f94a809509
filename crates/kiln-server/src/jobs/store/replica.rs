//! The database as a replica of a fleet's records: rows are written as they are elsewhere.

use rusqlite::{OptionalExtension, params};
use sha2::{Digest, Sha256};

use super::jobs::to_json;
use super::{FileKind, GalleryLimits, Store, StoreError, retention};
use crate::jobs::generator::name;
use crate::jobs::job::Job;

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Leaves it to the system when the database reaches the disk: a replica is made anew after a crash.
    pub(crate) fn skip_syncs(&self) -> Result<()> {
        Ok(self.writer()?.pragma_update(None, "synchronous", "OFF")?)
    }

    /// Writes a job at its place.
    pub(crate) fn put_job(&self, job: &Job) -> Result<()> {
        let place = i64::try_from(job.fleet.sequence).unwrap_or(i64::MAX);
        // A job that is tried again shows no error.
        let error = job.error.as_ref().filter(|_| job.state.is_final());
        let notes = (!job.notes.is_empty()).then(|| serde_json::to_string(&job.notes).unwrap_or_default());
        let (code, message) = error.map(|error| (error.code.name(), &error.message)).unzip();
        let mut db = self.writer()?;
        let transaction = db.transaction()?;
        // A place that another job has: this one comes last.
        let taken = transaction
            .query_row("SELECT 1 FROM jobs WHERE seq = ? AND id != ?", params![place, job.id], |_| Ok(()))
            .optional()?;
        let place = Some(place).filter(|_| taken.is_none());
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
                notes
            ],
        )?;
        for file in job.request.images() {
            let input = super::InputFiles::hash(name(&file.path)).to_owned();
            transaction.execute(
                "INSERT INTO job_inputs (job, input) SELECT ?1, ?2
                 WHERE NOT EXISTS (SELECT 1 FROM job_inputs WHERE job = ?1 AND input = ?2)",
                params![job.id, input],
            )?;
        }
        if let Some((key, fingerprint)) = &job.key {
            transaction.execute(
                "INSERT OR REPLACE INTO idempotency (client, key, fingerprint, job, created) VALUES (?, ?, ?, ?, ?)",
                params![job.client, key, fingerprint, job.id, job.created],
            )?;
        }
        match &job.webhook {
            Some(url) => transaction
                .execute("INSERT OR REPLACE INTO webhooks (job, url) VALUES (?, ?)", params![job.id, url])?,
            None => transaction.execute("DELETE FROM webhooks WHERE job = ?", [&job.id])?,
        };
        transaction.commit()?;
        Ok(())
    }

    pub(crate) fn drop_job(&self, id: &str) -> Result<()> {
        self.writer()?.execute("DELETE FROM jobs WHERE id = ?", [id])?;
        Ok(())
    }

    pub(crate) fn drop_image(&self, id: &str) -> Result<()> {
        self.writer()?.execute("DELETE FROM pictures WHERE id = ?", [id])?;
        self.writer()?.execute("DELETE FROM marks WHERE picture = ?", [id])?;
        Ok(())
    }

    pub(crate) fn put_marks(&self, id: &str, favourite: bool, trashed: Option<i64>) -> Result<()> {
        self.writer()?.execute(
            "INSERT OR REPLACE INTO marks (picture, favourite, trashed) VALUES (?, ?, ?)",
            params![id, favourite, trashed],
        )?;
        Ok(())
    }

    pub(crate) fn put_input(&self, hash: &str, client: &str, bytes: u64, used: i64) -> Result<()> {
        self.writer()?.execute(
            "INSERT OR REPLACE INTO inputs (hash, client, bytes, used) VALUES (?, ?, ?, ?)",
            params![hash, client, bytes as i64, used],
        )?;
        Ok(())
    }

    /// Deletes the claim of the client whose hash this is.
    pub(crate) fn drop_input(&self, hash: &str, client_hash: &str) -> Result<()> {
        let db = self.writer()?;
        let clients: Vec<String> = {
            let mut query = db.prepare("SELECT client FROM inputs WHERE hash = ?")?;
            query.query_map([hash], |row| row.get(0))?.collect::<std::result::Result<_, _>>()?
        };
        let is_meant = |client: &&String| kiln_base::hex(Sha256::digest(client)).starts_with(client_hash);
        for client in clients.iter().filter(is_meant) {
            db.execute("DELETE FROM inputs WHERE hash = ? AND client = ?", [hash, client])?;
        }
        Ok(())
    }

    /// Whether another image has the same file.
    pub(crate) fn is_file_shared(&self, file: &str) -> Result<bool> {
        let count: i64 =
            self.reader()
                .query_row("SELECT count(*) FROM pictures WHERE file = ?", [file], |row| row.get(0))?;
        Ok(count > 1)
    }

    /// The files that images and claims of inputs name.
    pub(crate) fn known_files(&self) -> Result<Vec<(FileKind, String)>> {
        let db = self.reader();
        let mut query = db.prepare("SELECT 0, file FROM pictures UNION SELECT 1, hash FROM inputs")?;
        let row = |row: &rusqlite::Row<'_>| {
            let kind = if row.get::<_, i64>(0)? == 0 { FileKind::Image } else { FileKind::Input };
            Ok((kind, row.get(1)?))
        };
        Ok(query.query_map([], row)?.collect::<std::result::Result<_, _>>()?)
    }

    /// The ids of images and jobs beyond the limits.
    pub(crate) fn beyond(&self, limits: GalleryLimits) -> Result<(Vec<String>, Vec<String>)> {
        let db = self.reader();
        retention::beyond(&db, limits)
    }
}

//! The database as a replica of a fleet's records: rows are written as they are elsewhere.

use rusqlite::params;
use sha2::{Digest, Sha256};

use super::{FileKind, GalleryLimits, Store, StoreError, jobs, retention};
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
        self.transaction(|transaction| {
            // A place that another job has: this one comes last.
            let mut taken = transaction.prepare("SELECT 1 FROM jobs WHERE seq = ? AND id != ?")?;
            let is_taken = taken.exists(params![place, job.id])?;
            jobs::put(transaction, job, Some(place).filter(|_| !is_taken))
        })
    }

    pub(crate) fn drop_job(&self, id: &str) -> Result<()> {
        self.execute("DELETE FROM jobs WHERE id = ?", [id])
    }

    pub(crate) fn drop_image(&self, id: &str) -> Result<()> {
        self.execute("DELETE FROM pictures WHERE id = ?", [id])?;
        self.execute("DELETE FROM marks WHERE picture = ?", [id])
    }

    pub(crate) fn put_marks(&self, id: &str, favourite: bool, trashed: Option<i64>) -> Result<()> {
        let put = "INSERT OR REPLACE INTO marks (picture, favourite, trashed) VALUES (?, ?, ?)";
        self.execute(put, params![id, favourite, trashed])
    }

    pub(crate) fn put_input(&self, hash: &str, client: &str, bytes: u64, used: i64) -> Result<()> {
        let put = "INSERT OR REPLACE INTO inputs (hash, client, bytes, used) VALUES (?, ?, ?, ?)";
        self.execute(put, params![hash, client, bytes as i64, used])
    }

    /// Deletes the claim of the client whose hash this is.
    pub(crate) fn drop_input(&self, hash: &str, client_hash: &str) -> Result<()> {
        let clients: Vec<String> =
            self.rows("SELECT client FROM inputs WHERE hash = ?", [hash], |row| row.get(0))?;
        let is_meant = |client: &&String| kiln_base::hex(Sha256::digest(client)).starts_with(client_hash);
        for client in clients.iter().filter(is_meant) {
            self.execute("DELETE FROM inputs WHERE hash = ? AND client = ?", [hash, client])?;
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
        self.rows("SELECT 0, file FROM pictures UNION SELECT 1, hash FROM inputs", [], |row| {
            let kind = if row.get::<_, i64>(0)? == 0 { FileKind::Image } else { FileKind::Input };
            Ok((kind, row.get(1)?))
        })
    }

    /// The ids of images and jobs beyond the limits.
    pub(crate) fn beyond(&self, limits: GalleryLimits) -> Result<(Vec<String>, Vec<String>)> {
        retention::beyond(&self.reader(), limits)
    }
}

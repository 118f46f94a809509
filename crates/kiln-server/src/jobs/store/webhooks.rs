//! Webhooks that are still to be called.

use rusqlite::OptionalExtension;

use super::{Store, StoreError};

impl Store {
    /// The address to call at the end of a job.
    pub(crate) fn webhook(&self, job: &str) -> Result<Option<String>, StoreError> {
        let db = self.reader();
        let mut query = db.prepare("SELECT url FROM webhooks WHERE job = ?")?;
        Ok(query.query_row([job], |row| row.get(0)).optional()?)
    }

    /// Ended jobs whose webhook was not called, oldest first.
    pub(crate) fn uncalled_webhooks(&self) -> Result<Vec<String>, StoreError> {
        let db = self.reader();
        let mut query = db.prepare(
            "SELECT job FROM webhooks JOIN jobs ON jobs.id = webhooks.job
             WHERE state IN ('done', 'failed', 'cancelled') ORDER BY seq",
        )?;
        Ok(query.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?)
    }

    /// Forgets the webhook of a job: it was called, or can't be.
    pub(crate) fn remove_webhook(&self, job: &str) -> Result<(), StoreError> {
        self.writer()?.execute("DELETE FROM webhooks WHERE job = ?", [job])?;
        Ok(())
    }
}

//! Webhooks that are still to be called.

use super::{Store, StoreError};

impl Store {
    /// The address to call at the end of a job.
    pub(crate) fn webhook(&self, job: &str) -> Result<Option<String>, StoreError> {
        self.row("SELECT url FROM webhooks WHERE job = ?", [job], |row| row.get(0))
    }

    /// Ended jobs whose webhook was not called, oldest first.
    pub(crate) fn uncalled_webhooks(&self) -> Result<Vec<String>, StoreError> {
        let sql = "SELECT job FROM webhooks JOIN jobs ON jobs.id = webhooks.job
             WHERE state IN ('done', 'failed', 'cancelled') ORDER BY seq";
        self.rows(sql, [], |row| row.get(0))
    }

    /// Forgets the webhook of a job: it was called, or can't be.
    pub(crate) fn remove_webhook(&self, job: &str) -> Result<(), StoreError> {
        self.execute("DELETE FROM webhooks WHERE job = ?", [job])
    }
}

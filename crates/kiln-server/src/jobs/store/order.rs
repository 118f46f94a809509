//! The order that clients give their waiting jobs.

use rusqlite::params;

use super::{Store, StoreError};

/// The place of a job, as an expression over the table of jobs.
pub(super) const RANK: &str = "coalesce((SELECT rank FROM job_ranks WHERE job = jobs.id), seq)";

impl Store {
    /// Gives the jobs that `arrange` returns each other's places, in its order.
    pub(crate) fn set_order(&self, arrange: impl FnOnce() -> Vec<String>) -> Result<(), StoreError> {
        self.transaction(|transaction| {
            let ids = arrange();
            let mut places = Vec::with_capacity(ids.len());
            for id in &ids {
                let sql = format!("SELECT {RANK} FROM jobs WHERE id = ?");
                places.push(transaction.query_row(&sql, [id], |row| row.get::<_, i64>(0))?);
            }
            places.sort_unstable();
            for (id, place) in ids.iter().zip(places) {
                let put = "INSERT OR REPLACE INTO job_ranks (job, rank) VALUES (?, ?)";
                transaction.execute(put, params![id, place])?;
            }
            Ok(())
        })
    }
}

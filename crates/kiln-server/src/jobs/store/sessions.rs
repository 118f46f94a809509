//! Browser sessions, so that they live through a restart.

use rusqlite::params;

use super::{Store, StoreError, now};
use crate::jobs::sessions::{Hash, Session};

impl Store {
    /// The sessions that have not expired, oldest first; expired ones are deleted.
    pub(crate) fn sessions(&self) -> Result<Vec<Session>, StoreError> {
        self.execute("DELETE FROM sessions WHERE expires <= ?", [now()])?;
        self.rows("SELECT hash, key, proof, expires FROM sessions ORDER BY expires", [], |row| {
            let (hash, proof): (Hash, Hash) = (row.get(0)?, row.get(2)?);
            Ok(Session { hash, key: row.get(1)?, proof, expires: row.get(3)? })
        })
    }

    pub(crate) fn insert_session(&self, session: &Session) -> Result<(), StoreError> {
        let Session { hash, key, proof, expires } = session;
        let put = "INSERT OR REPLACE INTO sessions (hash, key, proof, expires) VALUES (?, ?, ?, ?)";
        self.execute(put, params![hash, key, proof, expires])
    }

    pub(crate) fn delete_session(&self, session: &Session) -> Result<(), StoreError> {
        self.execute("DELETE FROM sessions WHERE hash = ?", params![session.hash])
    }
}

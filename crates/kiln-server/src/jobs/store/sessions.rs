//! Browser sessions, so that they live through a restart.

use rusqlite::params;

use super::{Store, StoreError, now};
use crate::jobs::sessions::{Hash, Session};

impl Store {
    /// The sessions that have not expired, oldest first; expired ones are deleted.
    pub(crate) fn sessions(&self) -> Result<Vec<Session>, StoreError> {
        let db = self.writer()?;
        db.execute("DELETE FROM sessions WHERE expires <= ?", [now()])?;
        let mut query = db.prepare("SELECT hash, key, proof, expires FROM sessions ORDER BY expires")?;
        let session = |row: &rusqlite::Row<'_>| {
            let (hash, proof): (Hash, Hash) = (row.get(0)?, row.get(2)?);
            Ok(Session { hash, key: row.get(1)?, proof, expires: row.get(3)? })
        };
        Ok(query.query_map([], session)?.collect::<Result<_, _>>()?)
    }

    pub(crate) fn insert_session(&self, session: &Session) -> Result<(), StoreError> {
        let Session { hash, key, proof, expires } = session;
        self.writer()?.execute(
            "INSERT OR REPLACE INTO sessions (hash, key, proof, expires) VALUES (?, ?, ?, ?)",
            params![hash, key, proof, expires],
        )?;
        Ok(())
    }

    pub(crate) fn delete_session(&self, session: &Session) -> Result<(), StoreError> {
        self.writer()?.execute("DELETE FROM sessions WHERE hash = ?", params![session.hash])?;
        Ok(())
    }
}

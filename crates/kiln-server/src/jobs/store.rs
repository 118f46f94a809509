//! Persistent state: a SQLite database of jobs and images, and the image files.
//!
//! An image's id is its job's id and its number, so a job that runs again after a crash overwrites its own files and
//! never duplicates an image.
//! A job is stored before its id is returned.

mod clean_up;
mod error;
mod files;
mod idempotency;
mod images;
mod inputs;
mod jobs;
mod lock;
mod marks;
mod order;
mod plots;
mod private;
mod replica;
mod retention;
mod schema;
mod sessions;
mod webhooks;

use std::borrow::Cow;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_base::lock;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Params, Row, Transaction, TransactionBehavior};

pub use error::StoreError;
pub(crate) use files::{FileKind, Files, INPUT_PREFIX, InputFiles, thumbnail_file};
pub(crate) use idempotency::IdempotencyKey;
pub use images::{ImageQuery, ImageRow};
pub(crate) use inputs::Claim;
pub(crate) use marks::Marks;
pub(crate) use plots::PlotRow;
pub use retention::GalleryLimits;

/// Pages of the write-ahead log that are kept before they go into the database: half a MiB.
const WAL_PAGES: u32 = 128;

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

/// Opens a database. SQLite's usual way on Windows ends at 260 characters.
fn open_database(file: &Path) -> rusqlite::Result<Connection> {
    match kiln_base::long_path(file) {
        Cow::Borrowed(file) => Connection::open(file),
        Cow::Owned(long) => Connection::open_with_flags_and_vfs(long, OpenFlags::default(), "win32-longpath"),
    }
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
        let writer = open_database(&file)?;
        writer.busy_timeout(BUSY_TIMEOUT)?;
        schema::check_version(&writer)?;
        // Commits survive a crash of the process; a power cut may lose the last ones, without corruption.
        writer.pragma_update(None, "journal_mode", "WAL")?;
        writer.pragma_update(None, "synchronous", "NORMAL")?;
        // A short log: on a full disk, what deleted images free is not used up by the deletes themselves.
        writer.pragma_update(None, "wal_autocheckpoint", WAL_PAGES)?;
        writer.pragma_update(None, "foreign_keys", "ON")?;
        schema::migrate(&writer)?;
        let reader = open_database(&file)?;
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

    /// Runs one statement that writes.
    fn execute(&self, sql: &str, values: impl Params) -> Result<(), StoreError> {
        self.writer()?.execute(sql, values)?;
        Ok(())
    }

    /// Runs statements that write, all or none: an error undoes them.
    fn transaction<T>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut db = self.writer()?;
        let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = work(&transaction)?;
        transaction.commit()?;
        Ok(done)
    }

    /// Reads the first row of a query, if there is one.
    fn row<T>(
        &self,
        sql: &str,
        values: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, StoreError> {
        Ok(self.reader().query_row(sql, values, read).optional()?)
    }

    /// Reads all rows of a query.
    fn rows<T>(
        &self,
        sql: &str,
        values: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, StoreError> {
        let db = self.reader();
        let mut query = db.prepare(sql)?;
        Ok(query.query_map(values, read)?.collect::<Result<_, _>>()?)
    }
}

/// Milliseconds since 1970.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

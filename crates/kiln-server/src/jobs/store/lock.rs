//! The lock on the data folder: one server at a time.

use std::fs::File;
use std::path::Path;

use kiln_base::{FileLock, lock_file};

use super::{StoreError, private};

/// Locks the folder until the returned file is closed; the system closes it when the process dies.
///
/// A lock of its own, not SQLite's: a second server must be refused before it reads the queue, while backups may read it.
pub(super) fn lock_folder(folder: &Path) -> Result<File, StoreError> {
    let path = folder.join("server.lock");
    let failed = |source| StoreError::File { path: path.clone(), source };
    let file = private::create_file(&path).map_err(failed)?;
    match lock_file(file).map_err(failed)? {
        FileLock::Locked(file) => Ok(file),
        FileLock::InUse => Err(StoreError::InUse),
        FileLock::Unsupported(file) => {
            tracing::warn!("the file system of the data folder has no locks: run only one server on it");
            Ok(file)
        }
    }
}

//! The lock on the data folder: one server at a time.

use std::fs::{File, TryLockError};
use std::path::Path;

use super::{StoreError, private};

/// Locks the folder until the returned file is closed; the system closes it when the process dies.
///
/// A lock of its own, not SQLite's: a second server must be refused before it reads the queue, while backups may read it.
pub(super) fn lock_folder(folder: &Path) -> Result<File, StoreError> {
    let path = folder.join("server.lock");
    let file = private::create_file(&path);
    let file = file.map_err(|source| StoreError::File { path: path.clone(), source })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse),
        Err(TryLockError::Error(source)) if source.kind() == std::io::ErrorKind::Unsupported => {
            tracing::warn!("the file system of the data folder has no locks: run only one server on it");
            Ok(file)
        }
        Err(TryLockError::Error(source)) => Err(StoreError::File { path, source }),
    }
}

//! A lock on a file, which one process holds at a time.

use std::fs::{File, TryLockError};
use std::io;

/// What trying to lock a file gave.
#[derive(Debug)]
pub enum FileLock {
    /// Locked until the file is closed; the system closes it when the process dies.
    Locked(File),
    /// Another process, or another handle of this one, holds the lock.
    InUse,
    /// The file system has no locks, as some network drives.
    Unsupported(File),
}

/// Locks an open file without waiting.
pub fn lock_file(file: File) -> io::Result<FileLock> {
    match file.try_lock() {
        Ok(()) => Ok(FileLock::Locked(file)),
        Err(TryLockError::WouldBlock) => Ok(FileLock::InUse),
        Err(TryLockError::Error(source)) if is_unsupported(&source) => Ok(FileLock::Unsupported(file)),
        Err(TryLockError::Error(source)) => Err(source),
    }
}

/// Whether a file system has no locks.
fn is_unsupported(error: &io::Error) -> bool {
    #[cfg(unix)]
    let codes = {
        use rustix::io::Errno;
        // The standard library knows another number for the first on macOS. The second is NFS's, without a service for locks.
        [Errno::NOTSUP, Errno::NOLCK].map(Errno::raw_os_error)
    };
    // ERROR_INVALID_FUNCTION and ERROR_NOT_SUPPORTED: drivers of cloud and RAM drives answer either.
    #[cfg(windows)]
    let codes = [1, 50];
    error.kind() == io::ErrorKind::Unsupported
        || error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_locked_until_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let open = || File::create(folder.path().join("a.lock")).unwrap();
        let FileLock::Locked(held) = lock_file(open()).unwrap() else { panic!("nobody holds it") };
        assert!(matches!(lock_file(open()).unwrap(), FileLock::InUse));
        drop(held);
        assert!(matches!(lock_file(open()).unwrap(), FileLock::Locked(_)));
    }
}

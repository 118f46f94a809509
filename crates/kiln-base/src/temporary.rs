//! Temporary files and folders beside those that they become, and what killed processes left of them.
//!
//! Each is locked while its process lives, so that [`remove_stale`] can tell an abandoned one from one in use.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

use tempfile::{Builder, NamedTempFile, TempDir};

use crate::rename;

const PREFIX: &str = ".kiln-";
const SUFFIX: &str = ".tmp";

/// Creates a temporary file in `folder`, locked until it is closed.
pub(crate) fn temporary_file(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX);
    // Temporary files are private by default; this one becomes a normal file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    loop {
        let file = builder.tempfile_in(folder)?;
        if claim(file.as_file(), file.path()) {
            return Ok(file);
        }
    }
}

/// A temporary folder, locked until it is dropped. Unless it is renamed, dropping it removes it.
#[derive(Debug)]
pub struct TemporaryFolder {
    // Before the folder: it can't be removed while it is locked.
    _lock: Option<File>,
    folder: TempDir,
}

impl TemporaryFolder {
    /// Creates a temporary folder in `parent`.
    pub fn create(parent: &Path) -> io::Result<TemporaryFolder> {
        loop {
            let folder = Builder::new().prefix(PREFIX).suffix(SUFFIX).tempdir_in(parent)?;
            if let Some(_lock) = lock_folder(folder.path()) {
                return Ok(TemporaryFolder { _lock, folder });
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Gives it another name in the same file system.
    pub fn rename(self, to: &Path) -> io::Result<()> {
        let TemporaryFolder { _lock, folder } = self;
        // Windows renames no folder that is locked.
        drop(_lock.filter(|_| cfg!(windows)));
        rename(folder.path(), to)?;
        // Renamed: nothing is left to remove.
        let _ = folder.keep();
        Ok(())
    }
}

/// Removes a file. Its name is free at once: on Windows, a file that a program has mapped gets a temporary name first, and
/// [`remove_stale`] removes it where that is not possible now.
pub fn remove_file(path: &Path) -> io::Result<()> {
    if !cfg!(windows) {
        return fs::remove_file(path);
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    // Dropping it removes it.
    Builder::new().prefix(PREFIX).suffix(SUFFIX).make_in(folder, |to| rename(path, to)).map(drop)
}

/// Removes the temporary files and folders of processes that were killed before they could. Those in use, and those of
/// other users, stay. Does nothing on file systems without locks.
pub fn remove_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let (path, kind) = (entry.path(), entry.file_type());
        let Ok(kind) = kind else { continue };
        if !(name.starts_with(PREFIX) && name.ends_with(SUFFIX)) {
            continue;
        }
        // Nothing to report: what can't be removed now stays for another run.
        if kind.is_file() {
            let opened = OpenOptions::new().read(true).write(true).open(&path).ok();
            let _ = opened.filter(|file| file.try_lock().is_ok()).map(|_lock| fs::remove_file(&path));
        } else if kind.is_dir() && is_abandoned(&path) {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// Locks a file that was just created. Returns false if [`remove_stale`] of another process took it before that.
fn claim(file: &File, path: &Path) -> bool {
    match file.try_lock() {
        Ok(()) => path.exists(),
        Err(TryLockError::WouldBlock) => false,
        // Some network drives have no locks; there, nothing is ever removed as stale.
        Err(TryLockError::Error(_)) => true,
    }
}

/// Locks a folder that was just created; `Some(None)` where that can't be done, `None` if [`remove_stale`] of another process
/// took it before that.
#[cfg(unix)]
fn lock_folder(path: &Path) -> Option<Option<File>> {
    let Ok(file) = File::open(path) else { return Some(None) };
    claim(&file, path).then_some(Some(file))
}

/// Whether nobody has locked a folder.
#[cfg(unix)]
fn is_abandoned(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}

/// A folder of Windows has no locks, but who opens it can forbid that it is deleted.
#[cfg(windows)]
fn lock_folder(path: &Path) -> Option<Option<File>> {
    let lock = open_folder(path, GENERIC_READ, SHARE_READ | SHARE_WRITE);
    path.exists().then(|| lock.ok())
}

/// Whether nobody forbids that a folder is deleted.
#[cfg(windows)]
fn is_abandoned(path: &Path) -> bool {
    open_folder(path, DELETE, SHARE_READ | SHARE_WRITE | SHARE_DELETE).is_ok()
}

#[cfg(windows)]
const GENERIC_READ: u32 = 0x8000_0000;
#[cfg(windows)]
const DELETE: u32 = 0x1_0000;
#[cfg(windows)]
const SHARE_READ: u32 = 1;
#[cfg(windows)]
const SHARE_WRITE: u32 = 2;
#[cfg(windows)]
const SHARE_DELETE: u32 = 4;

#[cfg(windows)]
fn open_folder(path: &Path, access: u32, share: u32) -> io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;
    // Without it, folders can't be opened.
    const FLAG_BACKUP_SEMANTICS: u32 = 0x200_0000;
    OpenOptions::new().access_mode(access).share_mode(share).custom_flags(FLAG_BACKUP_SEMANTICS).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_in_use_and_files_of_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let file = temporary_file(folder.path()).unwrap();
        let inner = TemporaryFolder::create(folder.path()).unwrap();
        fs::write(inner.path().join("a"), "a").unwrap();
        for name in [".kiln-state", "a.tmp", "b.kiln-1.tmp"] {
            fs::write(folder.path().join(name), "mine").unwrap();
        }
        remove_stale(folder.path());
        assert!(file.path().exists() && inner.path().join("a").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    }

    #[test]
    fn a_removed_file_is_gone_though_it_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "a").unwrap();
        let open = File::open(&path).unwrap();
        remove_file(&path).unwrap();
        assert!(!path.exists());
        assert_eq!(remove_file(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        drop(open);
        remove_stale(folder.path());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_killed_process_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".kiln-AbCdEf.tmp"), "half").unwrap();
        fs::create_dir_all(folder.path().join(".kiln-GhIjKl.tmp/transformer")).unwrap();
        remove_stale(folder.path());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        remove_stale(&folder.path().join("none"));
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::create_dir(&precious).unwrap();
        std::os::unix::fs::symlink(&precious, folder.path().join(".kiln-link.tmp")).unwrap();
        remove_stale(folder.path());
        assert!(precious.exists());
    }

    #[test]
    fn a_renamed_folder_stays() {
        let folder = tempfile::tempdir().unwrap();
        let inner = TemporaryFolder::create(folder.path()).unwrap();
        inner.rename(&folder.path().join("model")).unwrap();
        assert!(folder.path().join("model").is_dir());
    }
}

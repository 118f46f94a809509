//! Files that are written whole or not at all: into a temporary file in the same folder, which then takes the name.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use tempfile::NamedTempFile;

use crate::paths::{check_name, long_path};
use crate::rename::{PATIENCE, PAUSE, is_in_use};
use crate::temporary::temporary_file;

/// Writes a file whole or not at all, and syncs it to the disk. The rules are those of [`AtomicFile`].
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.file().write_all(bytes)?;
    file.commit()
}

/// A file that gets its name with [`commit`](AtomicFile::commit). Dropped before, it leaves nothing behind.
///
/// A symbolic link is followed. An existing file keeps its permissions; a new one gets those of the umask.
#[derive(Debug)]
pub struct AtomicFile {
    file: NamedTempFile,
    target: PathBuf,
    permissions: Option<Permissions>,
    before: Option<FileVersion>,
}

/// What tells whether a file was written meanwhile.
type FileVersion = (u64, Option<SystemTime>);

fn version(path: &Path) -> Option<FileVersion> {
    fs::metadata(path).ok().map(|found| (found.len(), found.modified().ok()))
}

impl AtomicFile {
    /// Starts a file that will be named `path`.
    ///
    /// Fails where `path` is a folder, a pipe or a device: the final rename would replace it. Fails also where it is a
    /// read-only file, and for names that Windows takes for something else.
    pub fn create(path: &Path) -> io::Result<AtomicFile> {
        check_name(path)?;
        let path = &*long_path(path);
        let (target, permissions) = match fs::metadata(path) {
            Ok(old) if !old.is_file() => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
            }
            Ok(old) if old.permissions().readonly() => {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the file is read-only"));
            }
            Ok(old) => match fs::canonicalize(path) {
                Ok(target) => (target, Some(old.permissions())),
                // Some drives of Windows tell no full paths; without links there is nothing to follow.
                Err(_) if cfg!(windows) && !path.is_symlink() => (path.to_owned(), Some(old.permissions())),
                Err(error) => return Err(error),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => (path.to_owned(), None),
            Err(error) => return Err(error),
        };
        let folder =
            target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let before = version(&target);
        Ok(AtomicFile { file: temporary_file(folder)?, target, permissions, before })
    }

    /// Starts a file that only its owner can read, whatever the permissions of an existing file are. On Windows the folder
    /// decides who can.
    pub fn create_private(path: &Path) -> io::Result<AtomicFile> {
        let file = AtomicFile::create(path)?;
        #[cfg(unix)]
        let file = {
            let permissions: Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            file.file.as_file().set_permissions(permissions.clone())?;
            AtomicFile { permissions: Some(permissions), ..file }
        };
        Ok(file)
    }

    /// The file to write to.
    pub fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Syncs the file to the disk and gives it its name.
    pub fn commit(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        self.commit_unsynced()
    }

    /// [`commit`](AtomicFile::commit), unless another process has written the file since it was started: its work is not lost.
    pub fn commit_unless_changed(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        let written =
            || io::Error::new(io::ErrorKind::AlreadyExists, "another process has written it meanwhile");
        if version(&self.target) != self.before {
            return Err(written());
        }
        if self.before.is_some() {
            return self.commit_unsynced();
        }
        let AtomicFile { mut file, target, .. } = self;
        let started = Instant::now();
        loop {
            let failed = match file.persist_noclobber(&target) {
                Ok(_) => return Ok(()),
                Err(failed) => failed,
            };
            file = failed.file;
            match failed.error {
                error if error.kind() == io::ErrorKind::AlreadyExists => return Err(written()),
                error if is_in_use(&error) && started.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
                error if is_in_use(&error) => return Err(error),
                // Not every file system can refuse to replace a file: not exFAT on macOS. A moment ago there was none.
                _ => {
                    file.persist(&target)?;
                    return Ok(());
                }
            }
        }
    }

    /// Gives the file its name without waiting for the disk: a power cut may lose it.
    pub fn commit_unsynced(self) -> io::Result<()> {
        if let Some(permissions) = &self.permissions {
            self.file.as_file().set_permissions(permissions.clone())?;
        }
        self.replace()
    }

    #[cfg(not(windows))]
    fn replace(self) -> io::Result<()> {
        self.file.persist(&self.target)?;
        Ok(())
    }

    /// Windows refuses to replace a file that is open, as virus scanners have new ones for a moment: this waits for them.
    #[cfg(windows)]
    fn replace(self) -> io::Result<()> {
        let AtomicFile { mut file, target, permissions, .. } = self;
        let started = Instant::now();
        loop {
            let failed = match file.persist(&target) {
                Ok(_) => return Ok(()),
                Err(failed) => failed,
            };
            if !is_in_use(&failed.error) {
                return Err(failed.error);
            }
            file = failed.file;
            // The standard library knows how to replace a file that others have opened for sharing, as Kiln does.
            if fs::rename(file.path(), &target).is_ok() {
                return permissions.map_or(Ok(()), |permissions| fs::set_permissions(&target, permissions));
            }
            if started.elapsed() > PATIENCE {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another program has it open"));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_new_file_and_an_old_one_get_the_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(names(folder.path()), ["a.png"]);
    }

    #[test]
    fn a_file_that_is_not_committed_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        let mut file = AtomicFile::create(&path).unwrap();
        file.file().write_all(b"half").unwrap();
        drop(file);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn what_another_process_wrote_meanwhile_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let start = |bytes: &[u8]| {
            let mut file = AtomicFile::create(&path).unwrap();
            file.file().write_all(bytes).unwrap();
            file
        };
        let (first, second) = (start(b"first"), start(b"second"));
        first.commit_unless_changed().unwrap();
        let error = second.commit_unless_changed().unwrap_err();
        assert_eq!(
            (error.kind(), fs::read(&path).unwrap()),
            (io::ErrorKind::AlreadyExists, b"first".to_vec())
        );
        // A file that was there before is replaced once.
        let (third, fourth) = (start(b"the third"), start(b"4"));
        third.commit_unless_changed().unwrap();
        assert!(fourth.commit_unless_changed().is_err());
        assert_eq!(fs::read(&path).unwrap(), b"the third");
        assert_eq!(names(folder.path()), ["a.gguf"]);
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_atomic(&folder.path().join("nowhere/a.png"), b"one").is_err());
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn a_folder_in_the_way_is_an_error_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a.png")).unwrap();
        let error = write_atomic(&folder.path().join("a.png"), b"one").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(names(folder.path()), ["a.png"]);
    }

    #[test]
    fn a_file_that_is_being_read_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        fs::write(&path, b"old").unwrap();
        let mut reader = File::open(&path).unwrap();
        write_atomic(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let mut old = String::new();
        io::Read::read_to_string(&mut reader, &mut old).unwrap();
        assert_eq!((old.as_str(), names(folder.path())), ("old", vec!["a.png".to_owned()]));
    }

    #[cfg(windows)]
    #[test]
    fn a_file_that_another_program_keeps_for_itself_is_an_error_until_it_is_closed() {
        use std::os::windows::fs::OpenOptionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        fs::write(&path, b"old").unwrap();
        let keep = || File::options().read(true).share_mode(1).open(&path).unwrap();
        let kept = keep();
        let error = write_atomic(&path, b"new").unwrap_err();
        assert_eq!(error.to_string(), "another program has it open");
        assert_eq!((fs::read(&path).unwrap(), names(folder.path()).len()), (b"old".to_vec(), 1));
        let closing = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(200));
            drop(kept);
        });
        write_atomic(&path, b"new").unwrap();
        closing.join().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn a_path_may_be_longer_than_windows_usually_takes() {
        let folder = tempfile::tempdir().unwrap();
        let deep = (0..6).fold(folder.path().to_owned(), |path, _| path.join("d".repeat(60)));
        fs::create_dir_all(&deep).unwrap();
        let path = deep.join("a.png");
        for text in ["one", "two"] {
            write_atomic(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(names(&deep), ["a.png"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_permissions_kept() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.png"), folder.path().join("link.png"));
        fs::write(&real, b"old").unwrap();
        fs::set_permissions(&real, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write_atomic(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[cfg(unix)]
    #[test]
    fn a_private_file_is_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        for name in ["a", "b"] {
            let path = folder.path().join(name);
            let mut file = AtomicFile::create_private(&path).unwrap();
            file.file().write_all(b"new").unwrap();
            file.commit().unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
    }

    #[test]
    fn a_read_only_file_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        fs::write(&path, b"old").unwrap();
        let writable = fs::metadata(&path).unwrap().permissions();
        let mut read_only = writable.clone();
        read_only.set_readonly(true);
        fs::set_permissions(&path, read_only).unwrap();
        assert!(write_atomic(&path, b"new").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        // Windows deletes no read-only file with its folder.
        fs::set_permissions(&path, writable).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn writing_to_a_device_is_an_error_and_leaves_it() {
        assert!(write_atomic(Path::new("/dev/null"), b"one").is_err());
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[cfg(windows)]
    #[test]
    fn a_name_that_windows_takes_for_something_else_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nul", "aux.png", "a.png.", "a.png:b"] {
            let error = write_atomic(&folder.path().join(name), b"one").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidFilename, "{name}");
        }
        assert!(names(folder.path()).is_empty());
    }
}

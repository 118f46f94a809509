//! Renaming where other programs may have the file open.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

/// How long to wait for other programs to close a file.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// Gives a file or folder another name in the same file system; a file of that name is replaced.
///
/// Windows refuses this while a program has the file open, as virus scanners and OneDrive have new ones for a moment: this waits
/// for them.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    let started = Instant::now();
    loop {
        match fs::rename(from, to) {
            Err(error) if is_in_use(&error) && started.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Whether a file could not be renamed, replaced or deleted because a program has it open or mapped, as Windows alone refuses.
pub(crate) fn is_in_use(error: &io::Error) -> bool {
    const ACCESS_DENIED: i32 = 5;
    const SHARING_VIOLATION: i32 = 32;
    const USER_MAPPED_FILE: i32 = 1224;
    let codes = [ACCESS_DENIED, SHARING_VIOLATION, USER_MAPPED_FILE];
    cfg!(windows) && error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_file_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["a", "b"] {
            fs::write(path(name), name).unwrap();
        }
        rename(&path("a"), &path("b")).unwrap();
        assert_eq!(fs::read(path("b")).unwrap(), b"a");
        assert!(!path("a").exists());
        assert_eq!(rename(&path("a"), &path("b")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[cfg(windows)]
    #[test]
    fn renaming_waits_for_a_program_that_has_the_file_open() {
        use std::os::windows::fs::OpenOptionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&from, b"new").unwrap();
        let scanned = fs::File::options().read(true).share_mode(1).open(&from).unwrap();
        let closing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(scanned);
        });
        rename(&from, &to).unwrap();
        closing.join().unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"new");
    }
}

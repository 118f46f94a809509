use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Writes a file whole or not at all: into a temporary file beside it, which then takes its name.
///
/// A link is followed, and an existing file keeps its permissions. What is not a plain file, such as a pipe or
/// a device, is written to directly.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes).map_err(|source| Error::Write { path: path.into(), source })
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (target, old) = match fs::metadata(path) {
        // Renaming over a pipe or a device would replace it.
        Ok(old) if !old.is_file() => return fs::OpenOptions::new().write(true).open(path)?.write_all(bytes),
        Ok(old) => (fs::canonicalize(path)?, Some(old)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => (path.to_path_buf(), None),
        Err(error) => return Err(error),
    };
    if old.as_ref().is_some_and(|old| old.permissions().readonly()) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the file is read-only"));
    }
    let folder = match target.parent() {
        Some(folder) if folder != Path::new("") => folder.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let mut file = temporary(&folder)?;
    file.write_all(bytes)?;
    if let Some(old) = old {
        file.as_file().set_permissions(old.permissions())?;
    }
    file.as_file().sync_all()?;
    file.persist(&target)?;
    Ok(())
}

/// A file that is removed again unless it is given a name.
fn temporary(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".kiln-").suffix(".part");
    #[cfg(unix)]
    {
        // The usual rights of a new file, cut by the umask, in place of a temporary file's private ones.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
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
    fn a_missing_folder_is_an_error_that_names_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nowhere/a.png");
        let message = write_atomic(&path, b"one").unwrap_err().to_string();
        assert!(message.contains("nowhere/a.png"), "{message}");
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn a_folder_in_the_way_is_an_error_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a.png")).unwrap();
        assert!(write_atomic(&folder.path().join("a.png"), b"one").is_err());
        assert_eq!(names(folder.path()), ["a.png"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_rights_kept() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real.png"), folder.path().join("link.png"));
        fs::write(&real, b"old").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write_atomic(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[cfg(unix)]
    #[test]
    fn a_read_only_file_is_kept() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        fs::write(&path, b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
        assert!(write_atomic(&path, b"new").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_to_and_stays_a_device() {
        write_atomic(Path::new("/dev/null"), b"one").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}

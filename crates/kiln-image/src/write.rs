//! Writing finished image files.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use crate::{Error, Result};

/// Writes a regular file atomically ([`kiln_base::write_atomic`]), and anything else directly.
///
/// Pipes and devices are written to directly because renaming a file over them would replace them.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes).map_err(|source| Error::Write { path: path.into(), source })
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(existing) if !existing.is_file() => OpenOptions::new().write(true).open(path)?.write_all(bytes),
        _ => kiln_base::write_atomic(path, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nowhere/a.png");
        let message = write_file(&path, b"one").unwrap_err().to_string();
        assert!(message.contains("nowhere/a.png"), "{message}");
    }

    #[test]
    fn a_folder_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_file(folder.path(), b"one").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_to_and_stays_a_device() {
        write_file(Path::new("/dev/null"), b"one").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}

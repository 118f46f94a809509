//! Opening files that users name. Opening a named pipe waits until another program writes to it, and reading a device may
//! never end: both are errors instead.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use crate::decode_text;
use crate::paths::check_name;

/// Opens a regular file for reading.
pub fn open_regular(path: &Path) -> io::Result<File> {
    check_regular(path)?;
    File::open(path)
}

/// Opens an input: a regular file, or what the shell connects (`/dev/stdin`, `<(command)`).
pub fn open_input(path: &Path) -> io::Result<File> {
    let connected = ["/dev/stdin", "/dev/fd", "/proc/self/fd"];
    if !connected.iter().any(|start| path.starts_with(start)) {
        check_regular(path)?;
    }
    File::open(path)
}

/// Reads a regular file.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a regular file as text, with the encodings of [`decode_text`].
pub fn read_regular_text(path: &Path) -> io::Result<String> {
    decode_text(read_regular(path)?)
}

fn check_regular(path: &Path) -> io::Result<()> {
    // Windows tells nothing of its devices.
    check_name(path)?;
    let metadata = fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::Error::new(ErrorKind::IsADirectory, "it is a folder"));
    }
    if !metadata.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_folders_are_refused_and_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.txt");
        fs::write(&file, "text").unwrap();
        assert_eq!(
            (read_regular(&file).unwrap(), read_regular_text(&file).unwrap()),
            (b"text".to_vec(), "text".into())
        );
        assert!(open_input(&file).is_ok());
        for open in [open_regular, open_input] {
            let (device, problem) = if cfg!(windows) {
                ("NUL", "Windows reserves this name for a device")
            } else {
                ("/dev/zero", "it is not a regular file")
            };
            assert_eq!(open(Path::new(device)).unwrap_err().to_string(), problem);
            assert_eq!(open(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
            assert_eq!(open(&folder.path().join("b")).unwrap_err().kind(), ErrorKind::NotFound);
        }
    }
}

//! Folders and files that only their owner can read.

use std::fs;
use std::io;
use std::path::Path;

/// Creates a folder if there is none, and makes it private. One with files of others, such as `/tmp`, stays as it is: what
/// is stored in it is private all the same.
pub(super) fn create_folder(path: &Path, own_file: &str) -> io::Result<()> {
    fs::create_dir_all(path)?;
    let is_empty = fs::read_dir(path)?.next().is_none();
    if is_empty || path.join(own_file).exists() {
        restrict(path, 0o700);
    }
    Ok(())
}

/// Creates a file if there is none, and makes it private.
pub(super) fn create_file(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.create(true).append(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    restrict(path, 0o600);
    Ok(file)
}

/// Takes the permissions of others away. A folder that somebody else owns stays as it is.
#[cfg(unix)]
fn restrict(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;

    let is_private = |metadata: fs::Metadata| metadata.permissions().mode() & 0o777 == mode;
    if fs::metadata(path).is_ok_and(is_private) {
        return;
    }
    if let Err(error) = fs::set_permissions(path, fs::Permissions::from_mode(mode)) {
        tracing::warn!(%error, "others may be able to read `{}`", path.display());
    }
}

#[cfg(not(unix))]
fn restrict(_: &Path, _: u32) {}

//! A folder that appears whole or not at all, and copies of files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kiln_base::TemporaryFolder;

use super::{ExportWatcher, read_error, write_error};
use kiln_engine::{Field, hint};

use crate::error::{Error, Result};

/// A new folder that gets its name with [`commit`](AtomicFolder::commit). Dropped before, it leaves nothing behind.
pub(super) struct AtomicFolder {
    /// Next to the final path, so that a rename moves it there.
    temporary: TemporaryFolder,
    target: PathBuf,
}

impl AtomicFolder {
    /// Starts a folder that will be named `path`, which must not exist.
    pub fn create(path: &Path) -> Result<AtomicFolder> {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = TemporaryFolder::create(parent).map_err(|e| {
            Error::missing(
                format!("can't create a folder in `{}`: {e}", parent.display()),
                hint!["choose another ", Field::Out],
            )
        })?;
        Ok(AtomicFolder { temporary, target: path.to_path_buf() })
    }

    /// Returns the folder to write to.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Gives the folder its name.
    pub fn commit(self) -> Result<()> {
        // Temporary folders are private; this one becomes a normal folder.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(self.path(), fs::Permissions::from_mode(0o755))
                .map_err(|e| write_error(&self.target, &e))?;
        }
        if self.target.symlink_metadata().is_ok() {
            // By another process, meanwhile.
            return Err(Error::missing(
                format!("`{}` exists already", self.target.display()),
                hint!["another program made it meanwhile: choose another ", Field::Out],
            ));
        }
        let AtomicFolder { temporary, target } = self;
        temporary.rename(&target).map_err(|e| write_error(&target, &e))
    }
}

/// Copies the accepted files of a folder and its subfolders, except hidden ones.
pub(super) fn copy_folder(
    from: &Path,
    to: &Path,
    accept: &dyn Fn(&str) -> bool,
    watcher: &dyn ExportWatcher,
) -> Result<()> {
    copy_files(from, to, accept, watcher)?;
    for (name, path) in entries(from)? {
        if path.is_dir() {
            let to = to.join(&name);
            fs::create_dir(&to).map_err(|e| write_error(&to, &e))?;
            copy_folder(&path, &to, accept, watcher)?;
        }
    }
    Ok(())
}

pub(super) fn copy_files(
    from: &Path,
    to: &Path,
    accept: &dyn Fn(&str) -> bool,
    watcher: &dyn ExportWatcher,
) -> Result<()> {
    for (name, path) in entries(from)? {
        if watcher.is_cancelled() {
            return Err(cancelled());
        }
        if path.is_file() && accept(&name) {
            // Follows links, which the Hugging Face cache is made of.
            let to = to.join(&name);
            fs::copy(&path, &to).map_err(|e| write_error(&to, &e))?;
        }
    }
    Ok(())
}

/// Lists the names and paths in a folder, sorted, without hidden ones.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let list = || -> io::Result<Vec<(String, PathBuf)>> {
        let named = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
        let mut all = Vec::new();
        for entry in fs::read_dir(folder)? {
            all.extend(named(entry?).filter(|(name, _)| !name.starts_with('.')));
        }
        all.sort();
        Ok(all)
    };
    list().map_err(|e| read_error(folder, &e))
}

fn cancelled() -> Error {
    Error::Open { source: Box::new(kiln_engine::Error::CANCELLED), hint: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_folders_of_one_name_the_first_stays() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model");
        let [first, second] = ["first", "second"].map(|text| {
            let folder = AtomicFolder::create(&target).unwrap();
            fs::write(folder.path().join("a"), text).unwrap();
            folder
        });
        first.commit().unwrap();
        assert!(second.commit().unwrap_err().to_string().contains("exists already"));
        assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

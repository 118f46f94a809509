//! The record of a training in its folder, and how trainings are found again at startup.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kiln_base::AtomicFile;
use serde::{Deserialize, Serialize};

use super::state::{TrainingJob, TrainingSnapshot};

const FILE: &str = "training.json";

/// What is stored about a training.
#[derive(Serialize, Deserialize)]
pub(super) struct Record {
    #[serde(flatten)]
    pub(super) job: TrainingJob,
    #[serde(flatten)]
    pub(super) snapshot: TrainingSnapshot,
}

impl Record {
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let mut file = AtomicFile::create_private(&folder.join(FILE))?;
        file.file().write_all(&serde_json::to_vec_pretty(self).unwrap_or_default())?;
        file.commit()
    }
}

/// Removes a training's folder. The record goes first: a folder without one is removed at the next start.
pub(super) fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_file(folder.join(FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::remove_dir_all(folder)
}

/// Creates the folder of trainings, private like the rest of the data.
pub(super) fn create_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)?;
    kiln_base::remove_stale(folder);
    Ok(())
}

/// Reads all records, the oldest first, each with its folder.
pub(super) fn load(folder: &Path) -> io::Result<Vec<(Record, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)?.flatten() {
        let path = entry.path();
        let is_id = |name: &str| name.len() == 24 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !entry.file_name().to_str().is_some_and(is_id) {
            continue;
        }
        let read = match fs::read(path.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Its deletion was interrupted.
                let _ = fs::remove_dir_all(&path);
                continue;
            }
            read => read,
        };
        match read.and_then(|bytes| Ok(serde_json::from_slice::<Record>(&bytes)?)) {
            Ok(record) => found.push((record, path)),
            Err(error) => tracing::error!(%error, "the training in `{}` can't be read", path.display()),
        }
    }
    found.sort_by(|(a, _), (b, _)| (a.job.created, &a.job.id).cmp(&(b.job.created, &b.job.id)));
    Ok(found)
}

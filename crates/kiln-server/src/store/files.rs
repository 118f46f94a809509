//! Files beside the database: images that were sent, named by their content, and images that were made.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::{Store, StoreError};

/// What a request calls an image that was sent.
pub(crate) const PREFIX: &str = "input:";
/// An image that was sent and that no job names is kept this long.
const UNUSED: Duration = Duration::from_secs(6 * 3600);

/// Images that were sent.
pub struct Inputs<'a>(pub(super) &'a Store);

impl Inputs<'_> {
    /// The name of an image file: `input:` and the hash of its bytes.
    pub fn name(bytes: &[u8]) -> String {
        let hash: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{PREFIX}{hash}")
    }

    /// Keeps an image file under its [`name`](Inputs::name).
    pub fn keep(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.place(name.strip_prefix(PREFIX).unwrap_or(name));
        match fs::File::open(&path) {
            // Used again: it starts to age anew. One that can't be touched is only forgotten earlier.
            Ok(file) => drop(file.set_modified(SystemTime::now())),
            Err(_) => write(&path, bytes).map_err(|source| StoreError::File { path, source })?,
        }
        Ok(())
    }

    /// The file of an input, if there is one.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        let hash = name.strip_prefix(PREFIX).unwrap_or(name);
        // Nothing but a hash is looked for: a name can't lead out of the folder.
        let is_hash =
            hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        is_hash.then(|| self.place(hash)).filter(|path| path.is_file())
    }

    fn place(&self, hash: &str) -> PathBuf {
        self.0.folder.join("inputs").join(hash)
    }
}

impl Store {
    /// Images that were sent.
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs(self)
    }

    /// Where the file of an image is.
    pub fn picture_path(&self, file: &str) -> PathBuf {
        self.folder.join("pictures").join(file)
    }

    /// Writes the file of an image.
    pub fn write_picture(&self, file: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.picture_path(file);
        write(&path, bytes).map_err(|source| StoreError::File { path, source })
    }

    /// Removes what is beyond the newest `keep` images, old jobs without any, and inputs that no job names.
    pub fn tidy(&self, keep: u32) -> Result<(), StoreError> {
        let gone = self.forget_beyond(keep)?;
        for file in gone {
            self.remove_files(&file);
        }
        let Ok(entries) = fs::read_dir(self.folder.join("inputs")) else { return Ok(()) };
        for entry in entries.flatten() {
            let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
            let name = entry.file_name();
            if age.is_some_and(|age| age > UNUSED) && !self.is_named(&name.to_string_lossy())? {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    /// [`Store::tidy`] at every 32nd call.
    pub(crate) fn tidy_now_and_then(&self, keep: u32) -> Result<(), StoreError> {
        const CALLS: u32 = 32;
        match self.untidy.fetch_add(1, Relaxed) % CALLS {
            0 => self.tidy(keep),
            _ => Ok(()),
        }
    }

    fn is_named(&self, input: &str) -> Result<bool, StoreError> {
        let db = self.db();
        let mut query = db.prepare("SELECT 1 FROM job_inputs WHERE input = ? LIMIT 1")?;
        Ok(query.exists([input])?)
    }

    /// Removes an image's file and its thumbnail.
    pub(super) fn remove_files(&self, file: &str) {
        let _ = fs::remove_file(self.picture_path(file));
        let _ = fs::remove_file(self.picture_path(&thumbnail(file)));
    }
}

/// The name of an image's thumbnail.
pub(crate) fn thumbnail(file: &str) -> String {
    format!("{file}.small.jpg")
}

/// Whole or not at all. Not forced to the disk: a power cut costs the last images, and nobody waits for the disk.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    let written = fs::File::create(&part).and_then(|mut file| file.write_all(bytes));
    let result = written.and_then(|()| fs::rename(&part, path));
    if result.is_err() {
        let _ = fs::remove_file(&part);
    }
    result
}

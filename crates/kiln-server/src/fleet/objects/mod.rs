//! Inputs and images of a fleet, with local copies of those in use.
//!
//! Every file is named by the SHA-256 of its content: equal files are stored once, and one whose content does not match
//! its name is refused.

mod content;
mod nats;
#[cfg(feature = "s3")]
mod s3;
mod storage;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kiln_base::hex;

use self::content::{Content, content_hash};
use self::storage::Storage;
use super::connect::patiently;
use super::error::{FleetError, Result};
use super::link::Link;
use crate::jobs::store::{FileKind, Files, Store, StoreError};

/// Most bytes of local copies; the oldest are deleted first.
const CACHE: u64 = 2 << 30;
/// How long a transfer may take, retries included.
const RETRY_TIMEOUT: Duration = Duration::from_secs(40);
/// How long one try may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The files of a fleet, without the local copies.
#[derive(Clone)]
pub(super) struct StoredFiles {
    link: Arc<Link>,
    storage: Arc<Storage>,
}

impl StoredFiles {
    /// Deletes old files that no record names: those of workers that died before they wrote the record. Storing a file
    /// again resets its age.
    pub(super) fn delete_orphans(&self, known: impl FnOnce() -> Result<HashSet<String>>) -> Result<()> {
        let limit = self.link.config.orphan_age;
        let mut old = self.link.wait(with_retries("listing files", || self.storage.list()))?;
        old.retain(|object| object.age > limit && is_object(&object.name));
        if old.is_empty() {
            return Ok(());
        }
        // Read after the listing, so that it has every record that was written before a file got old.
        let known = known()?;
        for object in old.iter().filter(|object| !known.contains(&object.name)) {
            tracing::info!(file = object.name, "deleting an orphaned file");
            self.delete(object.name.clone());
        }
        Ok(())
    }

    /// Deletes a stored file; one that can't be deleted now becomes an orphan.
    fn delete(&self, object: String) {
        let storage = Arc::clone(&self.storage);
        self.link.handle().spawn(async move {
            if let Err(error) = storage.delete(&object).await {
                tracing::warn!(file = object, error, "can't delete a file now");
            }
        });
    }
}

/// The files of a fleet.
#[derive(Clone)]
pub(super) struct Objects {
    pub(super) stored: StoredFiles,
    /// Holds the local copies.
    store: Arc<Store>,
    fetched: Arc<AtomicU32>,
}

impl Objects {
    /// Opens the storage that the link's configuration names.
    pub(super) fn open(link: &Arc<Link>, store: &Arc<Store>) -> Result<Objects> {
        let storage = link.wait(patiently(|| Storage::open(link)))?;
        let stored = StoredFiles { link: Arc::clone(link), storage: Arc::new(storage) };
        Ok(Objects { stored, store: Arc::clone(store), fetched: Arc::default() })
    }

    fn local_path(&self, kind: FileKind, name: &str) -> PathBuf {
        match kind {
            FileKind::Image => self.store.image_path(name),
            FileKind::Input => self.store.inputs().file_path(name),
        }
    }

    /// Fetches a file; `None` if there is none with this name, or if its content does not match the name.
    pub(super) fn fetch(&self, kind: FileKind, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(hash) = hash_of(name) else { return Ok(None) };
        let (StoredFiles { link, storage }, object) = (&self.stored, object_name(kind, name));
        match link.wait(with_retries("fetching a file", || storage.get(&object, &hash)))? {
            Content::Right(bytes) => Ok(Some(bytes)),
            Content::Missing => Ok(None),
            Content::Wrong => {
                tracing::error!(name, "refusing a file whose content does not match its hash");
                Ok(None)
            }
        }
    }

    /// Deletes the oldest local copies beyond the limit, in one of 64 calls.
    fn trim(&self) {
        if !self.fetched.fetch_add(1, Relaxed).is_multiple_of(64) {
            return;
        }
        let folders = [FileKind::Image, FileKind::Input].map(|kind| self.local_path(kind, ""));
        let mut copies: Vec<(std::time::SystemTime, u64, PathBuf)> = folders
            .iter()
            .filter_map(|folder| std::fs::read_dir(folder).ok())
            .flat_map(|entries| entries.flatten())
            .filter_map(|entry| {
                let metadata = entry.metadata().ok()?;
                Some((metadata.modified().ok()?, metadata.len(), entry.path()))
            })
            .collect();
        copies.sort();
        let mut bytes: u64 = copies.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, size, path) in copies {
            if bytes <= CACHE {
                break;
            }
            bytes -= size;
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The hash in a file's name: 64 hex digits, and an optional extension.
fn hash_of(name: &str) -> Option<[u8; 32]> {
    let (digits, extension) = name.split_once('.').unwrap_or((name, ""));
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let fits = digits.len() == 64
        && digits.bytes().all(is_digit)
        && extension.len() <= 8
        && extension.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let mut hash = [0; 32];
    for (byte, digits) in hash.iter_mut().zip(digits.as_bytes().chunks(2)).filter(|_| fits) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    fits.then_some(hash)
}

/// Whether this is the name of a file in the storage.
fn is_object(name: &str) -> bool {
    name.split_once('/')
        .is_some_and(|(kind, name)| matches!(kind, "image" | "input") && hash_of(name).is_some())
}

/// The name of a file in the storage.
pub(super) fn object_name(kind: FileKind, name: &str) -> String {
    match kind {
        FileKind::Image => format!("image/{name}"),
        FileKind::Input => format!("input/{name}"),
    }
}

/// Tries until it works, at most for [`RETRY_TIMEOUT`].
async fn with_retries<T, F>(what: &str, mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = std::result::Result<T, String>>,
{
    let started = Instant::now();
    loop {
        let error = match tokio::time::timeout(TIMEOUT, attempt()).await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error)) => error,
            Err(_) => "timed out".into(),
        };
        if started.elapsed() > RETRY_TIMEOUT {
            return Err(FleetError(format!("{what}: {error}")));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

impl Files for Objects {
    fn name(&self, _: &str, extension: &str, bytes: &[u8]) -> String {
        format!("{}.{extension}", hex(content_hash(bytes)))
    }

    fn put(&self, kind: FileKind, name: &str, bytes: &[u8]) -> std::result::Result<(), StoreError> {
        let unnamed = || FleetError(format!("`{name}` is not named by its content"));
        let hash = hash_of(name).ok_or_else(unnamed)?;
        let (StoredFiles { link, storage }, object) = (&self.stored, object_name(kind, name));
        let (bytes, fresh) = (Bytes::copy_from_slice(bytes), link.config.orphan_age / 2);
        let put = with_retries("storing a file", || storage.put(&object, &hash, bytes.clone(), fresh));
        // The client of a gateway does not wait for a queue that is out of order; a worker keeps its images.
        Ok(if link.is_hurried() { link.wait(link.while_writable(put)) } else { link.wait(put) }?)
    }

    fn path(&self, kind: FileKind, name: &str) -> std::result::Result<Option<PathBuf>, StoreError> {
        if hash_of(name).is_none() {
            return Ok(None);
        }
        let path = self.local_path(kind, name);
        if path.is_file() {
            return Ok(Some(path));
        }
        let Some(bytes) = self.fetch(kind, name)? else { return Ok(None) };
        write(&path, &bytes).map_err(|source| StoreError::File { path: path.clone(), source })?;
        self.trim();
        Ok(Some(path))
    }

    fn remove(&self, kind: FileKind, name: &str) {
        match kind {
            FileKind::Image => self.store.remove_files(name),
            FileKind::Input => drop(std::fs::remove_file(self.local_path(kind, name))),
        }
        self.stored.delete(object_name(kind, name));
    }

    fn discard_image(&self, name: &str) {
        // The worker that has the job now stores the same content under the same name. What belongs to nothing is deleted
        // as an orphan.
        self.store.remove_files(name);
    }
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;

    let mut file = kiln_base::AtomicFile::create_private(path)?;
    file.file().write_all(bytes)?;
    file.commit_unsynced()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hashes_are_names() {
        let hash = "0f".repeat(32);
        assert_eq!(hash_of(&hash), Some([0x0f; 32]));
        assert_eq!(hash_of(&format!("{hash}.png")), Some([0x0f; 32]));
        for wrong in
            ["", "../../x", &hash[1..], &format!("{hash}/x"), &format!("{hash}.a/b"), &hash.to_uppercase()]
        {
            assert_eq!(hash_of(wrong), None, "{wrong}");
        }
    }
}

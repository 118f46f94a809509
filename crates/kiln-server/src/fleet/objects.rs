//! Image files in NATS' object store, with a copy of those in use in a folder of this machine.
//!
//! Every file is named by the SHA-256 of its content: one that is stored twice is stored once, and one whose content is not
//! what its name says is refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kiln_base::hex;
use sha2::{Digest, Sha256};
use tokio::io::AsyncReadExt;

use super::link::{FleetError, Link, Result};
use crate::store::{FileKind, Files, Store, StoreError};

/// Bytes of the copies on this machine; the oldest go first.
const CACHE: u64 = 2 << 30;
/// How long a file may take to arrive or leave, tries included.
const PATIENCE: Duration = Duration::from_secs(40);
/// How long one try may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a message. Few and large ones are faster; the servers refuse more than a MiB.
const CHUNK: usize = 512 << 10;

/// The files of a fleet.
pub(super) struct Objects {
    pub(super) link: Arc<Link>,
    /// Holds the copies.
    pub(super) store: Arc<Store>,
    fetched: AtomicU32,
}

impl Objects {
    pub(super) fn new(link: &Arc<Link>, store: &Arc<Store>) -> Objects {
        Objects { link: Arc::clone(link), store: Arc::clone(store), fetched: AtomicU32::new(0) }
    }

    fn local_path(&self, kind: FileKind, name: &str) -> PathBuf {
        match kind {
            FileKind::Image => self.store.image_path(name),
            FileKind::Input => self.store.inputs().file_path(name),
        }
    }

    /// Fetches a file; `None` if there is none with this name, or if its content is not what its name says.
    pub(super) fn fetch(&self, kind: FileKind, name: &str) -> Result<Option<Vec<u8>>> {
        let (link, object) = (Arc::clone(&self.link), object_name(kind, name));
        let found = self.link.wait(async move { fetch(&link, &object).await })??;
        let Some(bytes) = found else { return Ok(None) };
        if hex(Sha256::digest(&bytes)) != hash_of(name) {
            tracing::error!(name, "refusing a file whose content is not what its name says");
            return Ok(None);
        }
        Ok(Some(bytes))
    }

    /// Deletes the oldest copies beyond the limit, every now and then.
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

/// The hash in a file's name.
fn hash_of(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

fn is_valid(name: &str) -> bool {
    let (hash, extension) = name.split_once('.').unwrap_or((name, ""));
    hash.len() == 64
        && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        && extension.len() <= 8
        && extension.bytes().all(|b| b.is_ascii_alphanumeric())
}

fn object_name(kind: FileKind, name: &str) -> String {
    match kind {
        FileKind::Image => format!("image/{name}"),
        FileKind::Input => format!("input/{name}"),
    }
}

/// Tries until it works, at most for [`PATIENCE`].
async fn patiently<T, F>(what: &str, mut attempt: impl FnMut() -> F) -> Result<T>
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
        if started.elapsed() > PATIENCE {
            return Err(FleetError(format!("{what}: {error}")));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn fetch(link: &Link, object: &str) -> Result<Option<Vec<u8>>> {
    use async_nats::jetstream::object_store::GetErrorKind;
    patiently("fetching a file", || async {
        let mut found = match link.files.get(object).await {
            Ok(found) => found,
            Err(error) if error.kind() == GetErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let mut bytes = Vec::with_capacity(found.info().size);
        match found.read_to_end(&mut bytes).await {
            Ok(_) => Ok(Some(bytes)),
            Err(error) => Err(error.to_string()),
        }
    })
    .await
}

async fn put(link: &Link, object: &str, bytes: &[u8]) -> Result<()> {
    use async_nats::jetstream::object_store::ObjectMetadata;
    patiently("storing a file", || async {
        // Named by its content: what is there is the same.
        if link.files.info(object).await.is_ok_and(|info| !info.deleted && info.size == bytes.len()) {
            return Ok(());
        }
        let metadata =
            ObjectMetadata { name: object.into(), chunk_size: Some(CHUNK), ..ObjectMetadata::default() };
        link.files.put(metadata, &mut &*bytes).await.map(|_| ()).map_err(|error| error.to_string())
    })
    .await
}

impl Files for Objects {
    fn name(&self, _: &str, extension: &str, bytes: &[u8]) -> String {
        format!("{}.{extension}", hex(Sha256::digest(bytes)))
    }

    fn put(&self, kind: FileKind, name: &str, bytes: &[u8]) -> std::result::Result<(), StoreError> {
        let (link, object, bytes) = (Arc::clone(&self.link), object_name(kind, name), bytes.to_vec());
        self.link.wait(async move { put(&link, &object, &bytes).await })??;
        Ok(())
    }

    fn path(&self, kind: FileKind, name: &str) -> std::result::Result<Option<PathBuf>, StoreError> {
        if !is_valid(name) {
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
        let (link, object) = (Arc::clone(&self.link), object_name(kind, name));
        self.link.handle().spawn(async move {
            // Left behind at worst.
            let _ = link.files.delete(object).await;
        });
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
        assert!(is_valid(&hash) && is_valid(&format!("{hash}.png")));
        for wrong in
            ["", "../../x", &hash[1..], &format!("{hash}/x"), &format!("{hash}.a/b"), &hash.to_uppercase()]
        {
            assert!(!is_valid(wrong), "{wrong}");
        }
    }
}

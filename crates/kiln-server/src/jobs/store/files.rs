//! The files beside the database: uploaded images, named by the hash of their content, and generated images.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kiln_base::{AtomicFile, hex};
use sha2::{Digest, Sha256};

use super::{DATABASE, Store, StoreError};

/// Prefix of the names of uploaded images in requests.
pub(crate) const INPUT_PREFIX: &str = "input:";

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// A generated image.
    Image,
    /// An uploaded image, named by the SHA-256 of its content.
    Input,
}

/// Stores image files by name.
pub(crate) trait Files: Send + Sync {
    /// The name of a generated image's file.
    fn name(&self, id: &str, extension: &str, bytes: &[u8]) -> String;

    fn put(&self, kind: FileKind, name: &str, bytes: &[u8]) -> Result<(), StoreError>;

    /// The path of a file on this machine; `None` if there is none with this name.
    fn path(&self, kind: FileKind, name: &str) -> Result<Option<PathBuf>, StoreError>;

    fn remove(&self, kind: FileKind, name: &str);

    /// Removes the file of an image whose row could not be written, unless it may belong to another one, too.
    fn discard_image(&self, name: &str) {
        self.remove(FileKind::Image, name);
    }
}

/// The uploaded image files.
pub struct InputFiles<'a>(pub(super) &'a Store);

impl InputFiles<'_> {
    /// The name of an image file: `input:` and the hash of its bytes.
    pub fn name(bytes: &[u8]) -> String {
        format!("{INPUT_PREFIX}{}", hex(Sha256::digest(bytes)))
    }

    /// Stores an image file under its [`name`](InputFiles::name).
    pub fn insert(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.file_path(name.strip_prefix(INPUT_PREFIX).unwrap_or(name));
        match fs::File::open(&path) {
            // Used again: reset its age. If that fails it is only deleted earlier.
            Ok(file) => drop(file.set_modified(SystemTime::now())),
            Err(_) => write(&path, bytes).map_err(|source| StoreError::File { path, source })?,
        }
        Ok(())
    }

    /// The file of an input, if there is one.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        let hash = name.strip_prefix(INPUT_PREFIX).unwrap_or(name);
        // Accept only a hash, so that a name can't lead out of the folder.
        let is_hash =
            hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        is_hash.then(|| self.file_path(hash)).filter(|path| path.is_file())
    }

    pub(crate) fn file_path(&self, hash: &str) -> PathBuf {
        self.0.folder.join("inputs").join(hash)
    }
}

impl Store {
    /// The uploaded image files.
    pub fn inputs(&self) -> InputFiles<'_> {
        InputFiles(self)
    }

    /// The path of a generated image's file.
    pub fn image_path(&self, file: &str) -> PathBuf {
        self.folder.join("pictures").join(file)
    }

    /// Writes the file of a generated image.
    pub fn write_image(&self, file: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.image_path(file);
        write(&path, bytes).map_err(|source| StoreError::File { path, source })
    }

    /// Checks that the folder is still there and has space, by writing a small file.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        static PROBE: [u8; 64 << 10] = [0; 64 << 10];
        let path = self.folder.join(DATABASE);
        fs::metadata(&path).map_err(|source| StoreError::File { path, source })?;
        for folder in ["inputs", "pictures"] {
            let path = self.folder.join(folder).join(".probe");
            // Never committed: dropping the file deletes it.
            let written = AtomicFile::create(&path).and_then(|mut file| file.file().write_all(&PROBE));
            written.map_err(|source| StoreError::File { path: self.folder.join(folder), source })?;
        }
        Ok(())
    }

    /// Deletes an image's file and its thumbnail.
    pub(crate) fn remove_files(&self, file: &str) {
        let _ = fs::remove_file(self.image_path(file));
        let _ = fs::remove_file(self.image_path(&thumbnail_file(file)));
    }
}

/// The file name of an image's thumbnail.
pub(crate) fn thumbnail_file(file: &str) -> String {
    format!("{file}.small.jpg")
}

/// Writes a file whole or not at all. Doesn't wait for the disk: a power cut may lose the last images.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create_private(path)?;
    file.file().write_all(bytes)?;
    file.commit_unsynced()
}

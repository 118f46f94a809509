//! The content of a stored file, compared with the hash in its name.

use std::time::{Duration, SystemTime};

/// The hash that names a file. On CPUs without SHA-256 instructions, `ring` takes a third less time than `sha2`.
pub(super) fn content_hash(bytes: &[u8]) -> ring::digest::Digest {
    ring::digest::digest(&ring::digest::SHA256, bytes)
}

/// What a file holds.
pub(super) enum Content {
    Missing,
    /// It does not match the hash in its name.
    Wrong,
    Right(Vec<u8>),
}

impl Content {
    /// Compares the content with the hash in its name.
    pub(super) fn checked(bytes: Vec<u8>, hash: &[u8; 32]) -> Content {
        if content_hash(&bytes).as_ref() == hash { Content::Right(bytes) } else { Content::Wrong }
    }
}

/// A stored file.
pub(super) struct StoredObject {
    pub(super) name: String,
    pub(super) age: Duration,
}

/// How long ago that was; zero if unknown or in the future.
pub(super) fn age(modified: Option<impl Into<SystemTime>>) -> Duration {
    modified.and_then(|time| time.into().elapsed().ok()).unwrap_or_default()
}

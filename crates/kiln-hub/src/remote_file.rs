//! A file of a repository on the hub.

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Its path in the repository.
    pub path: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its checksum and name in the cache: SHA-256 of large files (LFS), git's SHA-1 of small ones.
    pub hash: String,
}

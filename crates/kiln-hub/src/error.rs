//! Errors of downloading, finding and removing models.

use std::io;
use std::path::PathBuf;

use crate::client::RemoteFile;

/// A model that can't be downloaded, found or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not the name of a repository.
    #[error("`{name}` is not a model name: {reason}")]
    InvalidName {
        /// The given name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No folder for the cache.
    #[error("no home folder found, and neither HF_HOME nor HF_HUB_CACHE is set")]
    NoCache,
    /// An environment variable with a value that can't be used. The value may hold a password and is not shown.
    #[error("the variable {name} is not valid: {reason}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The hub requires a token, or does not accept the given one.
    #[error("`{repo}` requires an access token: it is gated, private, or does not exist (status {status})")]
    Unauthorised {
        /// The repository.
        repo: String,
        /// The hub's status code.
        status: u16,
    },
    /// The token is valid, but has no access.
    #[error("the token has no access to `{repo}`: it is gated, and its terms have not been accepted")]
    Gated {
        /// The repository.
        repo: String,
        /// The page where the terms can be accepted.
        page: String,
    },
    /// No such repository, revision or file.
    #[error("the hub has no {what}")]
    NotFound {
        /// What is missing.
        what: String,
    },
    /// An unexpected response.
    #[error("the hub answered {what} for `{url}`")]
    BadResponse {
        /// The response.
        what: String,
        /// The requested address.
        url: String,
    },
    /// No connection, or one that keeps breaking.
    #[error("can't download `{url}`: {reason}")]
    Connection {
        /// The requested address.
        url: String,
        /// What went wrong.
        reason: String,
    },
    /// A file name that leads out of the folder or is invalid on some system.
    #[error("`{repo}` has a file named {file:?}, which is not safe to write")]
    UnsafeName {
        /// The repository.
        repo: String,
        /// The file name.
        file: String,
    },
    /// A downloaded file has the wrong checksum.
    #[error("`{file}` of `{repo}` is damaged: its checksum is {found}, expected {expected}")]
    Checksum {
        /// The repository.
        repo: String,
        /// The file.
        file: String,
        /// The hub's checksum.
        expected: String,
        /// The checksum of the download.
        found: String,
    },
    /// The pattern matches no file.
    #[error("no file of `{repo}` matches `{pattern}`")]
    NoMatch {
        /// The repository.
        repo: String,
        /// The pattern.
        pattern: String,
        /// The repository's weight files.
        files: Vec<RemoteFile>,
    },
    /// A repository with several models and no pattern to choose one.
    #[error("`{repo}` has {} weight files; choose one", files.len())]
    Ambiguous {
        /// The repository.
        repo: String,
        /// Its weight files.
        files: Vec<RemoteFile>,
    },
    /// Too little room for the download.
    #[error(
        "not enough space in `{}`: the download needs {}, {} are free", folder.display(), GiB(*needed), GiB(*free)
    )]
    NoSpace {
        /// The cache's folder.
        folder: PathBuf,
        /// Bytes to download.
        needed: u64,
        /// Bytes free on its disk.
        free: u64,
    },
    /// Another program is downloading the same file.
    #[error("another program is downloading `{}`", file.display())]
    InProgress {
        /// The file.
        file: PathBuf,
    },
    /// A file operation failed.
    #[error("can't {doing} `{}`: {source}", file.display())]
    Io {
        /// The operation, such as `write`.
        doing: &'static str,
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Cancelled by the caller.
    #[error("cancelled")]
    Cancelled,
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// For `map_err`: adds the operation and the file to a system error.
pub(crate) fn io(doing: &'static str, file: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let file = file.into();
    move |source| Error::Io { doing, file, source }
}

/// Bytes, shown in GiB.
struct GiB(u64);

impl std::fmt::Display for GiB {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} GiB", self.0 as f64 / f64::from(1 << 30))
    }
}

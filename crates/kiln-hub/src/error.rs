//! Errors of downloading, finding and removing models.

use std::io;
use std::path::PathBuf;

use crate::remote_file::RemoteFile;

/// A model that can't be downloaded, found or removed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// Not the name of a repository.
    #[error("`{name}` is not a model name: {reason}")]
    InvalidName { name: String, reason: &'static str },
    /// No folder for the cache.
    #[error("no home folder found, and neither HF_HOME nor HF_HUB_CACHE is set")]
    NoCache,
    /// An environment variable with a value that can't be used. The value may hold a password and is not shown.
    #[error("the variable {name} is not valid: {reason}")]
    Variable { name: &'static str, reason: String },
    /// The hub requires a token, or does not accept the given one.
    #[error("`{repo}` requires an access token: it is gated, private, or does not exist (status {status})")]
    Unauthorised { repo: String, status: u16 },
    /// The token is valid, but has no access.
    #[error("the token has no access to `{repo}`: it is gated, and its terms have not been accepted")]
    Gated {
        repo: String,
        /// The page where the terms can be accepted.
        page: String,
    },
    /// No such repository, revision or file.
    #[error("the hub has no {what}")]
    NotFound { what: String },
    /// An unexpected response.
    #[error("the hub answered {what} for `{url}`")]
    BadResponse { what: String, url: String },
    /// No connection, or one that keeps breaking.
    #[error("can't download `{url}`: {reason}")]
    Connection { url: String, reason: String },
    /// A file name that leads out of the folder or is invalid on some system.
    #[error("`{repo}` has a file named {file:?}, which is not safe to write")]
    UnsafeName { repo: String, file: String },
    /// A downloaded file has the wrong checksum.
    #[error("`{file}` of `{repo}` is damaged: its checksum is {found}, expected {expected}")]
    Checksum { repo: String, file: String, expected: String, found: String },
    /// The pattern matches no file.
    #[error("no file of `{repo}` matches `{pattern}`")]
    NoMatch { repo: String, pattern: String, files: Vec<RemoteFile> },
    /// A repository with several models and no pattern to choose one.
    #[error("`{repo}` has {} weight files; choose one", files.len())]
    Ambiguous { repo: String, files: Vec<RemoteFile> },
    /// Too little room for the download.
    #[error(
        "not enough space in `{}`: the download needs {}, {} are free", folder.display(), GiB(*needed), GiB(*free)
    )]
    NoSpace { folder: PathBuf, needed: u64, free: u64 },
    /// Another program is downloading the same file.
    #[error("another program is downloading `{}`", file.display())]
    InProgress { file: PathBuf },
    /// A file operation failed.
    #[error("can't {doing} `{}`: {source}", file.display())]
    Io { doing: &'static str, file: PathBuf, source: io::Error },
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

use std::io;
use std::path::PathBuf;

use crate::client::RemoteFile;

/// Why a model can't be fetched, found or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a name of a repository.
    #[error("`{name}` is no name of a model: {reason}")]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// There is nowhere to put models.
    #[error("there is no home folder, and neither HF_HOME nor HF_HUB_CACHE says where models are kept")]
    NoCache,
    /// The hub asks who is there.
    #[error(
        "`{repo}` is not to be had without a token: it is gated, private, or does not exist (status {status})"
    )]
    Unauthorised {
        /// The repository.
        repo: String,
        /// What the hub answered.
        status: u16,
    },
    /// The hub knows who is there, and that is not enough.
    #[error("the token gives no access to `{repo}`: it is gated, and its terms have not been accepted")]
    Gated {
        /// The repository.
        repo: String,
        /// Where they can be.
        page: String,
    },
    /// No such repository, revision or file.
    #[error("the hub has no {what}")]
    NotFound {
        /// What it has not.
        what: String,
    },
    /// An answer that makes no sense.
    #[error("the hub answered {what} for `{url}`")]
    Answer {
        /// What it answered.
        what: String,
        /// What was asked.
        url: String,
    },
    /// No connection, or one that breaks time and again.
    #[error("can't fetch `{url}`: {reason}")]
    Connection {
        /// What was asked.
        url: String,
        /// What went wrong.
        reason: String,
    },
    /// A file name that would leave the folder, or that no system should be given.
    #[error("`{repo}` has a file with the name {file:?}, which is not safe to write")]
    UnsafeName {
        /// The repository.
        repo: String,
        /// The name.
        file: String,
    },
    /// What came is not what should have come.
    #[error("`{file}` of `{repo}` came damaged: its checksum is {found}, expected {expected}")]
    Checksum {
        /// The repository.
        repo: String,
        /// The file.
        file: String,
        /// The checksum that the hub gives.
        expected: String,
        /// The checksum of what came.
        found: String,
    },
    /// Nothing in the repository is asked for.
    #[error("no file of `{repo}` matches `{pattern}`")]
    NoMatch {
        /// The repository.
        repo: String,
        /// The pattern.
        pattern: String,
        /// The weights that are there.
        files: Vec<RemoteFile>,
    },
    /// A repository with several models, of which one has to be chosen.
    #[error("`{repo}` has {} files of weights, and it is not clear which one is meant", files.len())]
    Choose {
        /// The repository.
        repo: String,
        /// The weights that are there.
        files: Vec<RemoteFile>,
    },
    /// Another program is fetching the same file.
    #[error("another program is fetching `{}`", file.display())]
    Busy {
        /// The file.
        file: PathBuf,
    },
    /// The system refused.
    #[error("can't {doing} `{}`: {source}", file.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Stopped by the caller.
    #[error("cancelled")]
    Cancelled,
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// For `map_err`: the system refused to do this with `file`.
pub(crate) fn io(doing: &'static str, file: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let file = file.into();
    move |source| Error::Io { doing, file, source }
}

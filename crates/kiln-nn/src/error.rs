//! The crate's error type.

use std::path::{Path, PathBuf};

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// A file of the model folder can't be read.
    #[error("can't read `{file}`: {source}")]
    Read { file: PathBuf, source: std::io::Error },
    /// A configuration file is invalid or unsupported.
    #[error("`{file}`: {what}")]
    Config { file: PathBuf, what: String },
    /// The request is invalid.
    #[error("{0}")]
    Request(String),
    /// Values are NaN or infinite: damaged weights, an extreme guidance, or a LoRA with an extreme weight.
    #[error("{what} is not finite: it holds NaN or infinity")]
    NotFinite { what: String },
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The observer stopped the run.
    #[error("cancelled")]
    Cancelled,
    /// Reading weights failed.
    #[error(transparent)]
    Weights(kiln_weights::Error),
    /// Reading or preparing an image failed.
    #[error(transparent)]
    Image(#[from] kiln_image::Error),
    /// An operation of the backend failed.
    #[error(transparent)]
    Ops(#[from] kiln_ops::Error),
    /// Creating or converting a host tensor failed.
    #[error(transparent)]
    Tensor(#[from] kiln_tensor::Error),
}

impl Error {
    /// Creates an [`Error::Config`].
    pub fn config(file: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Error::Config { file: file.as_ref().to_path_buf(), what: what.into() }
    }

    /// Creates an [`Error::Request`].
    pub fn request(what: impl Into<String>) -> Self {
        Error::Request(what.into())
    }
}

impl From<kiln_weights::Error> for Error {
    fn from(error: kiln_weights::Error) -> Error {
        match error {
            kiln_weights::Error::Cancelled => Error::Cancelled,
            error => Error::Weights(error),
        }
    }
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

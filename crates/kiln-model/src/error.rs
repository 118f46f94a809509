use std::path::{Path, PathBuf};

/// Why a model could not be loaded or a picture could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the model folder can't be read.
    #[error("can't read `{file}`: {source}")]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A configuration file that makes no sense to us.
    #[error("`{file}`: {what}")]
    Config {
        /// The file.
        file: PathBuf,
        /// What was expected and what was found.
        what: String,
    },
    /// A request that can't be served.
    #[error("{0}")]
    Request(String),
    /// Numbers that are no numbers: damaged weights, or a LoRA with an absurd weight.
    #[error("{what} is not finite: it holds NaN or infinity")]
    NotFinite {
        /// What was computed or given.
        what: &'static str,
    },
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The observer asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// Weights.
    #[error(transparent)]
    Weights(#[from] kiln_weights::Error),
    /// Pictures.
    #[error(transparent)]
    Image(#[from] kiln_image::Error),
    /// An operation of the backend.
    #[error(transparent)]
    Ops(#[from] kiln_ops::Error),
    /// A host tensor.
    #[error(transparent)]
    Tensor(#[from] kiln_tensor::Error),
}

impl Error {
    /// A [`Error::Config`].
    pub fn config(file: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Error::Config { file: file.as_ref().to_path_buf(), what: what.into() }
    }

    /// A [`Error::Request`].
    pub fn request(what: impl Into<String>) -> Self {
        Error::Request(what.into())
    }
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

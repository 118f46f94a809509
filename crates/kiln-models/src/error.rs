//! Why a model could not be found, opened or downloaded.

/// An error about a model, with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid arguments or environment variables.
    #[error("{what}")]
    Usage {
        /// What is wrong.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// A model that does not exist, or that this build can't use.
    #[error("{what}")]
    Missing {
        /// What is missing.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// A model that can't be opened.
    #[error("{source}")]
    Open {
        /// What is wrong with it.
        source: Box<kiln_engine::Error>,
        /// Where the model may be instead.
        hint: Option<String>,
    },
    /// A download that failed.
    #[error(transparent)]
    Hub(#[from] kiln_hub::Error),
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn usage(what: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::Usage { what: what.into(), hint: hint.into() }
    }

    pub(crate) fn missing(what: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::Missing { what: what.into(), hint: hint.into() }
    }

    pub(crate) fn engine(error: impl Into<kiln_engine::Error>) -> Error {
        Error::Open { source: Box::new(error.into()), hint: None }
    }

    /// Returns what to do about it, as far as this crate knows.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Error::Usage { hint, .. } | Error::Missing { hint, .. } => Some(hint),
            Error::Open { hint, .. } => hint.as_deref(),
            Error::Hub(_) => None,
        }
    }
}

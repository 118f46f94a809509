use std::path::PathBuf;

use crate::memory::{Gib, MemoryNeed};

/// Why a model could not be loaded or an image could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request that can't be served as it is.
    #[error("{what}")]
    Request {
        /// What is wrong with it.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// Fields of a request that don't go together, named in backticks.
    #[error("{what}")]
    Combination {
        /// Which, and why.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// Parts of a model that don't belong together.
    #[error("the parts of `{model}` don't fit: {what}")]
    Mismatch {
        /// The model.
        model: PathBuf,
        /// Which parts, and the numbers that differ.
        what: String,
    },
    /// A model that lacks a part.
    #[error("{what}")]
    MissingPart {
        /// Which part, and where it was looked for.
        what: String,
        /// Which part.
        part: MissingPart,
    },
    /// A request that would need more memory than there is.
    #[error("an image of {width}×{height} needs about {need} beside the weights, and there are {}", Gib(*limit))]
    Memory {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// What it needs.
        need: MemoryNeed,
        /// Bytes that may be used.
        limit: u64,
        /// Whether even the smallest image would need more.
        any_size: bool,
    },
    /// A device that can't be used, or can't do what is asked.
    #[error("{what}")]
    Device {
        /// Which, and why.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// A model that could not be loaded for another request of the same batch.
    #[error("{0}")]
    Load(String),
    /// A thread of the engine panicked.
    #[error("generating failed in an unforeseen way: {0}")]
    Panicked(String),
    /// An error and what was being done.
    #[error("{source}")]
    While {
        /// What was being done.
        doing: String,
        /// The error.
        source: Box<Error>,
    },
    /// Weights, images, networks, operations.
    #[error(transparent)]
    Model(kiln_model::Error),
}

/// A part that a model lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPart {
    /// The autoencoder.
    Vae,
    /// The text encoder.
    TextEncoder,
}

impl MissingPart {
    /// Its folder in diffusers' layout.
    pub fn name(self) -> &'static str {
        match self {
            MissingPart::Vae => "vae",
            MissingPart::TextEncoder => "text_encoder",
        }
    }
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The request was cancelled.
    pub const CANCELLED: Error = Error::Model(kiln_model::Error::Cancelled);

    /// A request that can't be served as it is.
    pub fn request(what: impl Into<String>) -> Error {
        Error::Request { what: what.into(), hint: None }
    }

    /// Fields that don't go together, named in backticks.
    pub fn combination(what: impl Into<String>) -> Error {
        Error::Combination { what: what.into(), hint: None }
    }

    /// A file of a model that makes no sense.
    pub fn config(file: impl AsRef<std::path::Path>, what: impl Into<String>) -> Error {
        kiln_model::Error::config(file, what).into()
    }

    /// The same with what to do about it, where there is nothing better yet.
    pub fn hint(mut self, text: impl Into<String>) -> Error {
        if let Error::Request { hint, .. } | Error::Combination { hint, .. } | Error::Device { hint, .. } =
            &mut self
        {
            hint.get_or_insert(text.into());
        }
        self
    }

    /// Whether somebody asked for this end.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.root(), Error::Model(kiln_model::Error::Cancelled))
    }

    /// Whether the request is at fault, and not the server or the model.
    pub fn is_requests_fault(&self) -> bool {
        use kiln_model::Error as Inner;
        match self.root() {
            Error::Request { .. } | Error::Combination { .. } | Error::Memory { .. } => true,
            Error::Model(error) => matches!(error, Inner::Request(_) | Inner::Image(_)),
            _ => false,
        }
    }

    /// The error itself, without what was being done.
    pub fn root(&self) -> &Error {
        match self {
            Error::While { source, .. } => source.root(),
            error => error,
        }
    }
}

impl<E: Into<kiln_model::Error>> From<E> for Error {
    fn from(error: E) -> Error {
        match error.into() {
            kiln_model::Error::Request(what) => Error::Request { what, hint: None },
            error => Error::Model(error),
        }
    }
}

/// Adds to an error what was being done.
pub trait While<T> {
    /// Names it.
    fn while_doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<Error>> While<T> for std::result::Result<T, E> {
    fn while_doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| match error.into() {
            error if error.is_cancelled() => error,
            error => Error::While { doing: what(), source: Box::new(error) },
        })
    }
}

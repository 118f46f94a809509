//! The engine's error type: what went wrong, where, and often what to do about it.

use std::path::PathBuf;

use crate::memory::{HumanBytes, MemoryEstimate};

/// Why a model could not be loaded or an image could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid value in a request.
    #[error("{what}")]
    Request {
        /// What is wrong.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// A value of a field that is out of its range.
    #[error("{what}")]
    Value {
        /// Which field, its range, and what was found.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// Fields of a request that exclude or require each other. The message names them in backticks.
    #[error("{what}")]
    Combination {
        /// Which fields, and why.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// Components that belong to different models.
    #[error("the components of `{model}` don't fit together: {what}")]
    Mismatch {
        /// The model.
        model: PathBuf,
        /// Which components, and the sizes that differ.
        what: String,
    },
    /// A model without a component that the request needs.
    #[error("{what}")]
    MissingComponent {
        /// Which component, and where it was looked for.
        what: String,
        /// Which component.
        component: MissingComponent,
    },
    /// A request that needs more memory than is available.
    #[error(
        "an image of {width}×{height} needs about {estimate} in addition to the weights, and {} are available",
        HumanBytes(*limit)
    )]
    Memory {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// The memory it needs.
        estimate: MemoryEstimate,
        /// Available memory in bytes.
        limit: u64,
        /// Whether even the smallest image would need more.
        any_size: bool,
    },
    /// A device that is not available, or that lacks a capability.
    #[error("{what}")]
    Device {
        /// Which device, and why.
        what: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// A model that failed to load; reported to the other requests that wait for the same model.
    #[error("{0}")]
    Load(String),
    /// A panic inside the engine or a sink.
    #[error("generating failed unexpectedly: {0}")]
    Panicked(String),
    /// An error and what was being done.
    #[error("{source}")]
    Context {
        /// What was being done, such as "reading the mask".
        doing: String,
        /// The error.
        source: Box<Error>,
    },
    /// An error of the layers below: weights, images, networks, operations.
    #[error(transparent)]
    Model(kiln_model::Error),
}

/// A component that a model lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingComponent {
    /// The VAE.
    Vae,
    /// The text encoder.
    TextEncoder,
}

impl MissingComponent {
    /// Returns its folder in the diffusers layout.
    pub fn name(self) -> &'static str {
        match self {
            MissingComponent::Vae => "vae",
            MissingComponent::TextEncoder => "text_encoder",
        }
    }
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The error of a cancelled request.
    pub const CANCELLED: Error = Error::Model(kiln_model::Error::Cancelled);

    /// Creates an error for an invalid value in a request.
    pub fn request(what: impl Into<String>) -> Error {
        Error::Request { what: what.into(), hint: None }
    }

    /// Creates an error for a value that is out of range.
    pub fn value(what: impl Into<String>) -> Error {
        Error::Value { what: what.into(), hint: None }
    }

    /// Creates an error for fields that exclude or require each other; `what` names them in backticks.
    pub fn combination(what: impl Into<String>) -> Error {
        Error::Combination { what: what.into(), hint: None }
    }

    /// Creates an error for an invalid file of a model.
    pub fn config(file: impl AsRef<std::path::Path>, what: impl Into<String>) -> Error {
        kiln_model::Error::config(file, what).into()
    }

    /// Adds a hint, unless there is one already.
    pub fn hint(mut self, text: impl Into<String>) -> Error {
        if let Error::Request { hint, .. }
        | Error::Value { hint, .. }
        | Error::Combination { hint, .. }
        | Error::Device { hint, .. } = &mut self
        {
            hint.get_or_insert(text.into());
        }
        self
    }

    /// Whether the request was cancelled.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.root(), Error::Model(kiln_model::Error::Cancelled))
    }

    /// Whether memory is short, or no device has enough of it.
    pub fn is_out_of_memory(&self) -> bool {
        use kiln_model::Error as Inner;
        let memory = |error: &Inner| matches!(error, Inner::Ops(kiln_ops::Error::Memory { .. }));
        match self.root() {
            Error::Memory { .. } | Error::Device { .. } => true,
            Error::Model(error) => memory(error),
            _ => false,
        }
    }

    /// Whether the request is at fault, not the server or the model.
    pub fn is_invalid_request(&self) -> bool {
        use kiln_model::Error as Inner;
        match self.root() {
            Error::Request { .. }
            | Error::Value { .. }
            | Error::Combination { .. }
            | Error::Memory { .. } => true,
            Error::Model(error) => matches!(error, Inner::Request(_) | Inner::Image(_)),
            _ => false,
        }
    }

    /// Returns the error without its context.
    pub fn root(&self) -> &Error {
        match self {
            Error::Context { source, .. } => source.root(),
            error => error,
        }
    }
}

impl<E: Into<kiln_model::Error>> From<E> for Error {
    fn from(error: E) -> Error {
        match error.into() {
            kiln_model::Error::Request(what) => Error::Value { what, hint: None },
            error => Error::Model(error),
        }
    }
}

/// Adds context to errors.
pub(crate) trait ErrorContext<T> {
    /// Adds what was being done. Cancellation stays as it is.
    fn with_context(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<Error>> ErrorContext<T> for std::result::Result<T, E> {
    fn with_context(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| match error.into() {
            error if error.is_cancelled() => error,
            error => Error::Context { doing: doing(), source: Box::new(error) },
        })
    }
}

//! The engine's error type: what went wrong, where, and what to do about it.

mod field;
mod kind;
mod layers;
mod lora;
mod text;

use std::path::PathBuf;

pub use field::{Field, FieldGroup};
pub use kind::{ErrorKind, Explain};
pub use text::{FieldNames, Hint, Piece, Text};

use crate::hint;
use crate::memory::{HumanBytes, MemoryEstimate};

/// Why a model could not be loaded or an image could not be generated.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// What the engine refuses.
    #[error("{what}")]
    Refused { kind: ErrorKind, what: Text, hint: Option<Hint> },
    /// Components that belong to different models.
    #[error("the components of `{model}` don't fit together: {what}")]
    Mismatch { model: PathBuf, what: String },
    /// A model without a component that the request needs.
    #[error("{what}")]
    MissingComponent {
        /// Which component, and where it was looked for.
        what: String,
        component: MissingComponent,
        hint: Hint,
    },
    /// A request that needs more memory than is available.
    #[error(
        "an image of {width}×{height} needs about {estimate} in addition to the weights, and {} are available",
        HumanBytes(*limit)
    )]
    Memory {
        width: usize,
        height: usize,
        estimate: MemoryEstimate,
        limit: u64,
        /// Whether even the smallest image would need more.
        any_size: bool,
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
        source: Box<Error>,
    },
    /// A file that can't be signed.
    #[error(transparent)]
    Credentials(kiln_credentials::Error),
    /// An error of the layers below: weights, images, networks, operations.
    #[error(transparent)]
    Model(kiln_nn::Error),
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
    pub const CANCELLED: Error = Error::Model(kiln_nn::Error::Cancelled);

    /// Creates an error of this kind.
    pub fn refused(kind: ErrorKind, what: impl Into<Text>) -> Error {
        Error::Refused { kind, what: what.into(), hint: None }
    }

    /// Creates an error for a request that can't be fulfilled.
    pub fn request(what: impl Into<Text>) -> Error {
        Error::refused(ErrorKind::Request, what)
    }

    /// Creates an error for a value out of its range, or for fields that exclude or require each other.
    pub fn value(what: impl Into<Text>) -> Error {
        Error::refused(ErrorKind::Value, what)
    }

    /// Creates an error for an invalid file of a model.
    pub fn config(file: impl AsRef<std::path::Path>, what: impl Into<String>) -> Error {
        kiln_nn::Error::config(file, what).into()
    }

    /// Adds a hint, unless there is one already.
    #[must_use]
    pub fn with_hint(mut self, text: impl Into<Hint>) -> Error {
        if let Error::Refused { hint, .. } = &mut self {
            hint.get_or_insert(text.into());
        }
        self
    }

    /// Makes the error of a model that of a file which the request names: the model is not at fault.
    #[must_use]
    pub(crate) fn of_file(self, kind: ErrorKind) -> Error {
        match self.kind() {
            ErrorKind::Model => Error::Refused { kind, what: self.message(), hint: self.hint() },
            _ => self,
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

impl Explain for Error {
    fn kind(&self) -> ErrorKind {
        match self.root() {
            Error::Refused { kind, .. } => *kind,
            Error::Mismatch { .. } | Error::MissingComponent { .. } | Error::Load(_) => ErrorKind::Model,
            Error::Memory { .. } => ErrorKind::TooLarge,
            Error::Panicked(_) | Error::Context { .. } => ErrorKind::Internal,
            Error::Credentials(error) => error.kind(),
            Error::Model(error) => error.kind(),
        }
    }

    fn message(&self) -> Text {
        match self.root() {
            Error::Refused { what, .. } => what.clone(),
            error => error.to_string().into(),
        }
    }

    fn context(&self) -> Vec<&str> {
        match self {
            Error::Context { doing, source } => {
                let mut context = source.context();
                if context.last() != Some(&doing.as_str()) {
                    context.push(doing);
                }
                context
            }
            _ => Vec::new(),
        }
    }

    fn hint(&self) -> Option<Hint> {
        match self.root() {
            Error::Refused { hint, .. } => hint.clone(),
            Error::Mismatch { .. } => Some(hint![
                "the components belong to different models: klein 4B needs Qwen3-4B (hidden size 2560), klein 9B needs \
                 Qwen3-8B (4096), dev needs Mistral-Small-3.2-24B (5120); take all folders from one download"
            ]),
            Error::MissingComponent { hint, .. } => Some(hint.clone()),
            Error::Memory { any_size: true, .. } => Some(hint![
                "no image size is small enough: the transformer is too wide for this machine, if its config.json is \
                 right; a lower ",
                Field::MaxTokens,
                " may help"
            ]),
            Error::Memory { .. } => Some(
                hint!["use a smaller size (", Field::Width, ", ", Field::Height, ")"; "use fewer reference images"],
            ),
            Error::Load(_) | Error::Panicked(_) | Error::Context { .. } => None,
            Error::Credentials(error) => Explain::hint(error),
            Error::Model(error) => error.hint(),
        }
    }
}

impl<E: Into<kiln_nn::Error>> From<E> for Error {
    fn from(error: E) -> Error {
        match error.into() {
            kiln_nn::Error::Request(what) => Error::value(what),
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

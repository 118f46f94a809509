//! The crate's error type.

use std::path::{Path, PathBuf};

use kiln_engine::{ErrorKind, Explain, Field, Hint, Text, hint};

/// Why a training could not start or continue.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// A setting is invalid, or does not fit the model.
    #[error("{0}")]
    Settings(String),
    /// An example does not fit the model or its own sizes.
    #[error("{0}")]
    Example(String),
    /// A saved state does not fit the settings or the model.
    #[error("{0}")]
    State(String),
    /// The loss or a gradient is NaN or infinite; the adapter was not changed by this step.
    #[error("{what} is not finite in step {step}")]
    NotFinite {
        /// What is not finite: `the loss` or `the gradient`.
        what: &'static str,
        step: u64,
    },
    /// A value of a request that is out of its range, or does not fit others.
    #[error("{what}")]
    Value {
        /// The field, its range, and what was found.
        what: Text,
        hint: Option<Hint>,
    },
    /// An error with what was being done.
    #[error("{source}")]
    Context { doing: String, source: Box<Error> },
    /// The images, captions or files of a training are unusable.
    #[error("{what}")]
    Data { what: String, hint: Option<Hint> },
    /// The training was stopped because it no longer learns.
    #[error("{what}")]
    Diverged {
        what: String,
        /// The step of the last checkpoint, from which it can continue at a lower learning rate.
        saved: Option<u64>,
    },
    /// Another training writes the same files.
    #[error("another training writes to `{}`", folder.display())]
    InUse { folder: PathBuf },
    /// A file could not be read or written.
    #[error("can't {doing} `{}`: {source}", path.display())]
    Io {
        /// What was attempted: `read`, `write`, `create`.
        doing: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A model can't be found or opened.
    #[error(transparent)]
    Models(#[from] kiln_catalog::Error),
    /// The engine failed: opening a model, or generating a sample.
    #[error(transparent)]
    Engine(#[from] kiln_engine::Error),
    /// Reading or writing tensors failed.
    #[error(transparent)]
    Weights(#[from] kiln_weights::Error),
    /// Reading or preparing an image failed.
    #[error(transparent)]
    Image(#[from] kiln_image::Error),
    /// The transformer failed.
    #[error(transparent)]
    Model(#[from] kiln_nn::Error),
    /// An operation of the backend failed.
    #[error(transparent)]
    Ops(#[from] kiln_ops::Error),
    /// Creating or converting a host tensor failed.
    #[error(transparent)]
    Tensor(#[from] kiln_tensor::Error),
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The error of a cancelled training.
    pub const CANCELLED: Error = Error::Model(kiln_nn::Error::Cancelled);

    /// Creates an error about images, captions or files.
    pub fn data(what: impl Into<String>) -> Error {
        Error::Data { what: what.into(), hint: None }
    }

    /// Creates an error about a field of a request.
    pub(crate) fn value(what: impl Into<Text>) -> Error {
        Error::Value { what: what.into(), hint: None }
    }

    /// Adds what was being done.
    pub(crate) fn with_context(self, doing: impl Into<String>) -> Error {
        Error::Context { doing: doing.into(), source: Box::new(self) }
    }

    /// Adds a hint to an error about data or a value, unless there is one already.
    #[must_use]
    pub fn with_hint(mut self, text: impl Into<Hint>) -> Error {
        if let Error::Data { hint, .. } | Error::Value { hint, .. } = &mut self {
            hint.get_or_insert(text.into());
        }
        self
    }

    /// Returns a function that wraps the system's error about a file.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Error::Io { doing, path: path.to_owned(), source }
    }
}

impl Explain for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Error::Settings(_) | Error::Value { .. } => ErrorKind::Value,
            Error::Context { source, .. } => source.kind(),
            Error::Models(error) => error.kind(),
            Error::Example(_) | Error::State(_) | Error::Data { .. } | Error::InUse { .. } => ErrorKind::Data,
            Error::NotFinite { .. } => ErrorKind::NotFinite,
            Error::Diverged { .. } => ErrorKind::Diverged,
            Error::Io { .. } => ErrorKind::File,
            Error::Engine(error) => error.kind(),
            Error::Weights(error) => error.kind(),
            Error::Image(error) => error.kind(),
            Error::Model(error) => error.kind(),
            Error::Ops(error) => error.kind(),
            Error::Tensor(_) => ErrorKind::Internal,
        }
    }

    fn message(&self) -> Text {
        match self {
            Error::Value { what, .. } => what.clone(),
            Error::Context { source, .. } => source.message(),
            Error::Models(error) => error.message(),
            Error::Engine(error) => error.message(),
            error => error.to_string().into(),
        }
    }

    fn context(&self) -> Vec<&str> {
        match self {
            Error::Context { doing, source } => {
                let mut context = source.context();
                context.push(doing);
                context
            }
            Error::Models(error) => error.context(),
            Error::Engine(error) => error.context(),
            _ => Vec::new(),
        }
    }

    fn hint(&self) -> Option<Hint> {
        let gentler = hint![
            "start over with a lower ", Field::LearningRate, " (a third)";
            "with a longer ", Field::Warmup;
            "with ", Field::Dtype.to("f32")
        ];
        match self {
            Error::Data { hint, .. } | Error::Value { hint, .. } => hint.clone(),
            Error::Context { source, .. } => source.hint(),
            Error::Models(error) => error.hint(),
            Error::Diverged { saved: Some(step), .. } => {
                let resume = hint![
                    format!("continue from the checkpoint of step {step} with "),
                    Field::Resume.on(),
                    " and a lower ",
                    Field::LearningRate,
                    " (a third)"
                ];
                Some(resume.or(gentler))
            }
            Error::Diverged { saved: None, .. } => Some(gentler),
            Error::InUse { .. } => Some(hint!["wait until it ends"; "choose another ", Field::Output]),
            Error::Io { doing: "read", .. } => Some(hint!["check the path"]),
            Error::Io { .. } => Some(hint!["check that the disk is not full and the folder is writable"]),
            Error::State(_) => Some(hint!["the state is damaged: start over with ", Field::Overwrite.on()]),
            Error::Engine(error) => error.hint(),
            Error::Weights(error) => error.hint(),
            Error::Image(error) => error.hint(),
            Error::Model(error) => error.hint(),
            Error::Ops(error) => error.hint(),
            Error::Settings(_) | Error::Example(_) | Error::NotFinite { .. } | Error::Tensor(_) => None,
        }
    }
}

//! What every door (command line, HTTP, Python, C) tells about an error.

use super::{Hint, Text};

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident,)*) => {
        /// What kind of error it is. Each door has one exhaustive table from it: to exit codes, HTTP statuses, exceptions
        /// and C's codes; `docs/errors.md` has all four.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorKind {
            $($(#[$doc])* $kind,)*
        }

        impl ErrorKind {
            /// Every kind.
            pub const ALL: &[ErrorKind] = &[$(ErrorKind::$kind,)*];

            /// Returns its name, as in `docs/errors.md`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(ErrorKind::$kind => stringify!($kind),)*
                }
            }
        }
    };
}

kinds! {
    /// A field has a value out of its range, or fields exclude or require each other.
    Value,
    /// The request can't be fulfilled: an image or a tensor that does not fit.
    Request,
    /// A file that the request names can't be read.
    Input,
    /// The images, captions or files of a training are unusable.
    Data,
    /// A LoRA that does not fit the model, or is damaged.
    Lora,
    /// A model that does not exist, is damaged, or lacks a component.
    Model,
    /// A download that failed.
    Download,
    /// A device that is not available, or that lacks a capability.
    Device,
    /// A request that needs more memory than there is.
    TooLarge,
    /// The memory is used up.
    OutOfMemory,
    /// The result holds NaN or infinity.
    NotFinite,
    /// A training that no longer learns.
    Diverged,
    /// A file that can't be written, or is gone.
    File,
    /// The caller cancelled it.
    Cancelled,
    /// A bug.
    Internal,
}

/// An error of the engine, of the layers below it, of finding models or of training.
pub trait Explain: std::error::Error {
    /// Returns what kind of error it is.
    fn kind(&self) -> ErrorKind;

    /// Returns what is wrong, without its context.
    fn message(&self) -> Text {
        self.to_string().into()
    }

    /// Returns what was being done, innermost first.
    fn context(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Whether the caller cancelled it.
    fn is_cancelled(&self) -> bool {
        self.kind() == ErrorKind::Cancelled
    }

    /// Returns what to do about it.
    fn hint(&self) -> Option<Hint>;
}

use std::path::PathBuf;

/// Why a GPU can't be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// A library that was found nowhere.
    #[error("{library} was not found: {install}")]
    Missing {
        /// What was looked for.
        library: &'static str,
        /// What to install, or where to say that it is.
        install: &'static str,
    },
    /// A library that is there but can't be used.
    #[error("`{}` can't be used: {what}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What the loader says, or which function it lacks.
        what: String,
    },
    /// A call that failed.
    #[error("{call}: {what}")]
    Call {
        /// The function that was called.
        call: &'static str,
        /// The library's word for it.
        what: String,
    },
    /// No GPU of that number.
    #[error("there is no CUDA device {ordinal}: the driver shows {count}")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A GPU that is too old for the kernels.
    #[error("{name} has compute capability {major}.{minor}, and 8.0 is the least the kernels need")]
    TooOld {
        /// The GPU's name.
        name: String,
        /// Compute capability, first part.
        major: i32,
        /// Compute capability, second part.
        minor: i32,
    },
    /// A kernel that did not compile.
    #[error("kernels `{source_name}` did not compile for {arch}:\n{log}")]
    Compile {
        /// Stem of the source file.
        source_name: &'static str,
        /// What it was compiled for.
        arch: String,
        /// The compiler's words.
        log: String,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

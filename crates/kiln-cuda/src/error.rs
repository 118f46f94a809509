use std::path::PathBuf;

/// An error of the CUDA backend.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// A library was not found.
    #[error("{library} was not found: {install}")]
    Missing {
        /// Name of the library.
        library: &'static str,
        /// What to install or set.
        install: &'static str,
    },
    /// A library exists but cannot be used.
    #[error("`{}` can't be used: {what}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The loader's message, or the missing function.
        what: String,
    },
    /// A library call failed.
    #[error("{call}: {what}")]
    Call {
        /// Name of the function.
        call: &'static str,
        /// The library's error message.
        what: String,
    },
    /// No GPU has the requested index.
    #[error("there is no CUDA device {ordinal}: the driver reports {count}")]
    NoDevice {
        /// The requested index.
        ordinal: usize,
        /// Number of GPUs.
        count: usize,
    },
    /// The GPU is too old for the kernels.
    #[error("{name} has compute capability {major}.{minor}; the kernels need 8.0 or newer")]
    TooOld {
        /// The GPU's name.
        name: String,
        /// Major compute capability.
        major: i32,
        /// Minor compute capability.
        minor: i32,
    },
    /// `KILN_CUDA_KERNELS` is no compute capability.
    #[error("KILN_CUDA_KERNELS is `{text}`, expected a compute capability such as 8.6")]
    Capability {
        /// Its value.
        text: String,
    },
    /// The GPU can't run the kernels of another compute capability.
    #[error(
        "{name} (compute capability {}.{}) can't run the kernels for {}.{}: only its own and older ones from 8.0 to 8.9",
        own.0, own.1, kernels.0, kernels.1
    )]
    OtherKernels {
        /// The GPU's name.
        name: String,
        /// Its compute capability.
        own: (i32, i32),
        /// That of the kernels.
        kernels: (i32, i32),
    },
    /// A kernel did not compile.
    #[error("kernels `{source_name}` did not compile for {arch}:\n{log}")]
    Compile {
        /// Stem of the source file.
        source_name: &'static str,
        /// Target architecture.
        arch: String,
        /// The compiler's log.
        log: String,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

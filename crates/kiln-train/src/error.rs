//! The crate's error type.

/// Why a training could not start or continue.
#[derive(Debug, thiserror::Error)]
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
        /// The step, counted from 1.
        step: u64,
    },
    /// The transformer failed.
    #[error(transparent)]
    Model(#[from] kiln_model::Error),
    /// An operation of the backend failed.
    #[error(transparent)]
    Ops(#[from] kiln_ops::Error),
    /// Creating or converting a host tensor failed.
    #[error(transparent)]
    Tensor(#[from] kiln_tensor::Error),
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

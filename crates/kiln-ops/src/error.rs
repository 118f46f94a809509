use kiln_tensor::DType;

/// An operation that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arguments do not fit each other.
    #[error("{op}: {what}")]
    Arguments {
        /// The operation.
        op: &'static str,
        /// The argument, what was expected and what was found.
        what: String,
    },
    /// The backend has no kernel for this dtype.
    #[error("{op}: no kernel for {dtype} on {backend}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The dtype of the argument.
        dtype: DType,
        /// The backend's name.
        backend: String,
    },
    /// An allocation failed.
    #[error("out of memory on {backend}: {bytes} more bytes needed")]
    Memory {
        /// The backend's name.
        backend: String,
        /// Size of the allocation that failed.
        bytes: usize,
    },
    /// An error reported by a device or its libraries.
    #[error("{backend}: {what}")]
    Device {
        /// The backend's name.
        backend: String,
        /// The reported error.
        what: String,
    },
    /// An invalid host tensor.
    #[error(transparent)]
    Tensor(#[from] kiln_tensor::Error),
    /// Tensors that don't form a linear layer.
    #[error(transparent)]
    Linear(#[from] kiln_tensor::LinearError),
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

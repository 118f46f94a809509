use kiln_tensor::DType;

/// Why an operation could not be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arguments do not fit each other.
    #[error("{op}: {what}")]
    Arguments {
        /// The operation.
        op: &'static str,
        /// Which argument, what was expected and what was found.
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
    /// Memory that could not be had.
    #[error("out of memory on {backend}: {bytes} bytes more were needed")]
    Memory {
        /// The backend's name.
        backend: String,
        /// Size of the allocation that failed.
        bytes: usize,
    },
    /// Anything a device or its libraries report.
    #[error("{backend}: {what}")]
    Device {
        /// The backend's name.
        backend: String,
        /// The report.
        what: String,
    },
    /// A host tensor that can't be used.
    #[error(transparent)]
    Tensor(#[from] kiln_tensor::Error),
    /// Tensors that don't make a linear layer.
    #[error(transparent)]
    Linear(#[from] kiln_tensor::LinearError),
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

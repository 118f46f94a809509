use crate::api::Api;

/// Why an adapter can't be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// No adapter has the requested number.
    #[error("there is no adapter {number}{}: {found}", of(*.api))]
    NoAdapter {
        /// The requested number.
        number: usize,
        /// The requested interface; `None` for any.
        api: Option<Api>,
        /// What was found instead.
        found: String,
    },
    /// The adapter lacks something that the kernels need.
    #[error("{name} can't be used: {reason}")]
    Unsuitable {
        /// The adapter's name.
        name: String,
        /// What it lacks.
        reason: String,
    },
    /// The driver refused to open the adapter.
    #[error("{name} could not be opened: {what}")]
    Open {
        /// The adapter's name.
        name: String,
        /// The driver's message.
        what: String,
    },
}

fn of(api: Option<Api>) -> String {
    api.map_or(String::new(), |api| format!(" of {}", api.name()))
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

//! Errors of the engine as the server's clients see them.

use kiln_engine::Explain;
use kiln_server::JobError;

/// Turns an error into the one that the server's clients see. The log has the whole message, with the server's folders.
pub fn job_error(error: &impl Explain) -> JobError {
    let seen = JobError::explained(error);
    if seen.is_of_server() {
        tracing::error!("{error}");
    }
    seen
}

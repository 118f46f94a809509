//! A fleet: `kiln worker`, `kiln queue`, `kiln workers`, and `kiln serve --queue` as a gateway.

mod queue;
mod shared;
mod worker;

use kiln_base::TemporaryFolder;
use kiln_server::fleet::open_gateway;
use kiln_server::{Config, Server};

use crate::args::{FleetCommand, ServeArgs, ServerList};
use crate::error::CliError;
use shared::{queue_error, temporary_folder};

pub fn run(command: FleetCommand) -> Result<(), CliError> {
    match command {
        FleetCommand::Worker(args) => worker::run(*args),
        FleetCommand::Queue(args) => queue::run(&args),
        FleetCommand::Workers(args) => queue::run_workers(&args),
    }
}

/// Opens the server of a gateway. Its folder lasts as long as the second value, unless the options name one.
pub fn gateway(
    args: &ServeArgs,
    config: Config,
    servers: &ServerList,
) -> Result<(Server, Option<TemporaryFolder>), CliError> {
    let temporary = if args.data.is_none() { Some(temporary_folder()?) } else { None };
    let folder = temporary.as_ref().map_or(config.folder.as_path(), TemporaryFolder::path).to_path_buf();
    let config = Config { folder, ..config };
    let server = open_gateway(config, args.fleet.config(servers)).map_err(|error| queue_error(&error))?;
    Ok((server, temporary))
}

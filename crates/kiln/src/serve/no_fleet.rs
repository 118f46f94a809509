//! A server without fleets.

use kiln_base::TemporaryFolder;
use kiln_server::{Config, Server};

use crate::args::{FleetCommand, ServeArgs, ServerList};
use crate::error::CliError;

pub fn run(command: FleetCommand) -> Result<(), CliError> {
    match command {}
}

pub fn gateway(
    _: &ServeArgs,
    _: Config,
    servers: &ServerList,
) -> Result<(Server, Option<TemporaryFolder>), CliError> {
    match *servers {}
}

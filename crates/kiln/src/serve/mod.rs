//! `kiln serve`: runs the `kiln-server` HTTP server on the engine; `kiln worker` and `kiln queue` for a fleet of them.

mod access;
mod bench;
mod browser;
mod catalogue;
mod command;
mod devices;
mod downloads;
mod engines;
mod errors;
mod files;
#[cfg_attr(not(feature = "fleet"), path = "no_fleet.rs")]
mod fleet;
mod generator;
mod inputs;
mod listen;
mod process;
mod signals;
mod start;
mod trainer;
mod turn;
mod upsample;

use crate::args::{BenchArgs, ServeCommand};
use crate::error::CliError;

pub fn run(command: ServeCommand) -> Result<(), CliError> {
    match command {
        ServeCommand::Serve(args) => command::run(*args),
        ServeCommand::Fleet(command) => fleet::run(command),
    }
}

/// Runs `kiln bench --server`; `None` if the options don't ask for it.
pub fn bench(args: &BenchArgs) -> Option<Result<(), CliError>> {
    args.server.server.then(|| bench::run(args))
}

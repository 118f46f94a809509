//! A program without the server.

use crate::args::{BenchArgs, ServeCommand};
use crate::error::CliError;

pub fn run(command: ServeCommand) -> Result<(), CliError> {
    match command {}
}

pub fn bench(_: &BenchArgs) -> Option<Result<(), CliError>> {
    None
}

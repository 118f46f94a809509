//! A server without fleets: no command, no option, and a queue that is only a number of jobs.

use clap::{Args, Subcommand};

#[derive(Clone, Debug, Args)]
pub struct FleetArgs {}

#[derive(Debug, Subcommand)]
pub enum FleetCommand {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerList {}

pub fn parse_servers(_: &str) -> Result<ServerList, String> {
    Err("expected a number from 1 to 10000".into())
}

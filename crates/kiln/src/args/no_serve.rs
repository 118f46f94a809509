//! A program without the server: no command, no option.

use std::path::Path;

use clap::{Args, Command, Subcommand};

#[derive(Debug, Subcommand)]
pub enum ServeCommand {}

impl ServeCommand {
    pub fn config(&self) -> Option<&Path> {
        match *self {}
    }
}

pub fn serve_options() -> Option<Command> {
    None
}

#[derive(Clone, Debug, Args)]
pub struct BenchServerArgs {}

//! `kiln man`: the manual pages, made from the help texts.

use std::path::Path;

use clap::CommandFactory;

use crate::args::Cli;
use crate::error::CliError;

pub fn run(folder: &Path) -> Result<(), CliError> {
    // `kiln help COMMAND` shows what the page of COMMAND says.
    let command = Cli::command()
        .disable_help_subcommand(true)
        .mut_subcommand("config", |config| config.disable_help_subcommand(true));
    let failed = |e: std::io::Error| {
        CliError::new(format!("can't write the manual pages to `{}`: {e}", folder.display()))
            .hint("give a folder that can be written to")
    };
    std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(command, folder)).map_err(failed)
}

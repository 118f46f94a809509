//! Arguments of `kiln credentials`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub struct CredentialsArgs {
    /// Folder of the key and the certificates [default: `credentials` in the data folder]
    #[arg(long, value_name = "DIR", global = true)]
    pub folder: Option<PathBuf>,
    #[command(subcommand)]
    pub command: CredentialsCommand,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum CredentialsCommand {
    /// Make a private key, a certificate for ten years, and the root that whoever checks your images has to trust
    New {
        /// Your name, or that of your studio or service, as everybody who gets an image can read it
        #[arg(long)]
        name: String,
        /// Replace a key that is there
        #[arg(long)]
        overwrite: bool,
    },
    /// Show whom they name, where they are, and until when they are valid
    Show,
}

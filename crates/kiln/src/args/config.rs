//! Arguments of `kiln config`.

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: Option<ConfigCommand>,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// List every setting, its value and where the value comes from
    List {
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the value of a setting
    Get {
        /// Name of the setting
        key: String,
    },
    /// Set a setting
    Set {
        /// Name of the setting
        key: String,
        /// Its value, as for the option
        value: String,
    },
    /// Return a setting to its default
    Unset {
        /// Name of the setting
        key: String,
    },
    /// Print the path of the settings file
    Path,
}

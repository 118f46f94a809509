//! Options of `kiln train`: the fields of a [`TrainRequest`], and those of the command line alone.

use clap::Args;
use kiln_train::TrainRequest;

use super::{ComponentArgs, MachineArgs};

#[derive(Debug, Default, Args)]
pub struct TrainArgs {
    #[command(flatten)]
    pub request: TrainRequest,

    #[command(flatten)]
    pub components: ComponentArgs,

    /// Check the images, estimate the cost, and stop
    #[arg(long, help_heading = "Images")]
    pub dry_run: bool,

    /// Print only errors
    #[arg(short, long, help_heading = "Output")]
    pub quiet: bool,

    #[command(flatten)]
    pub machine: MachineArgs,
}

//! The options of the check that images must pass.

use clap::Args;

/// The check that images must pass before they are written or shown.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct CheckArgs {
    /// Ask a program or an HTTP service before an image is written or shown: a command, which gets the image on standard
    /// input and the prompt in KILN_PROMPT and exits with 0 to accept or 1 to refuse, or a URL; no previews meanwhile
    #[arg(long, value_name = "COMMAND|URL")]
    pub check_with: Option<String>,

    /// Seconds that the check may take for an image; after that the image is refused
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=3600), requires = "check_with")]
    pub check_timeout: Option<u32>,
}

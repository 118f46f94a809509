//! Arguments of `kiln pull`, `kiln models` and `kiln rm`.

use clap::Args;

#[derive(Debug, Args)]
pub struct PullArgs {
    /// A short name, or `OWNER/REPO[@REVISION][:FILE]`; FILE is a pattern with `*`, or a part of a file's name
    pub name: String,
    /// Accept the model's licence, such as the FLUX Non-Commercial License of dev and klein 9B; asked for on a terminal
    #[arg(long)]
    pub accept_license: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Print only errors
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct ModelsArgs {
    /// Also list models of other families in the Hugging Face cache
    #[arg(long)]
    pub all: bool,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Name of the model, as listed by `kiln models`
    pub name: String,
    /// Don't ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
}

//! What `kiln pull`, `kiln models` and `kiln rm` are told.

use clap::Args;

#[derive(Debug, Args)]
pub struct PullArgs {
    /// A short name, or `OWNER/REPO[@REVISION][:FILE]`; FILE may be a pattern with `*` or a part of a file's name
    pub name: String,
    /// What was fetched, as JSON
    #[arg(long)]
    pub json: bool,
    /// Say nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct ModelsArgs {
    /// Also models of other families that are in the Hugging Face cache
    #[arg(long)]
    pub all: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// The name, as `kiln models` lists it
    pub name: String,
    /// Don't ask
    #[arg(short, long)]
    pub yes: bool,
}

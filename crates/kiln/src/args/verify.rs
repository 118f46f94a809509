//! Arguments of `kiln verify`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Image files
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Root certificates to trust, besides those of C2PA's list and one's own: PEM; repeatable
    #[arg(long, value_name = "FILE")]
    pub trust: Vec<PathBuf>,
    /// Print JSON, an object per file
    #[arg(long)]
    pub json: bool,
}

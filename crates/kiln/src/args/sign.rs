//! The options of signing.

use std::path::PathBuf;

use clap::Args;

/// Who signs image files.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct SignArgs {
    /// Sign image files (C2PA): who made them, with what model, when; see `kiln credentials` [default: `sign` of the settings]
    #[arg(long)]
    pub sign: bool,

    /// Don't sign image files, whatever the settings say
    #[arg(long, conflicts_with_all = ["sign", "sign_key", "sign_with", "timestamp_url", "producer"])]
    pub no_sign: bool,

    /// Private key to sign with: PEM in PKCS#8 [default: that of `kiln credentials new`]
    #[arg(long, value_name = "FILE", requires = "sign_cert")]
    pub sign_key: Option<PathBuf>,

    /// Certificate of the key, and those above it: PEM
    #[arg(long, value_name = "FILE", requires = "sign_key")]
    pub sign_cert: Option<PathBuf>,

    /// Program that signs, for keys in a KMS or HSM: with --signer-info it prints `alg` and `sign_cert` as JSON, else it
    /// reads what to sign and prints the signature, as c2patool's signers do
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["sign_key", "sign_cert"])]
    pub sign_with: Option<String>,

    /// Authority that adds a time stamp to every signature (RFC 3161), so that files stay valid when the certificate has
    /// expired; it gets a hash of the signature [default: `timestamp_url` of the settings, else none]
    #[arg(long, value_name = "URL")]
    pub timestamp_url: Option<String>,

    /// Name of the provider in signed files, besides the name in the certificate
    #[arg(long, value_name = "NAME")]
    pub producer: Option<String>,
}

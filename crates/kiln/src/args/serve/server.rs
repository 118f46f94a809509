//! Arguments of `kiln serve`.

use std::path::PathBuf;

use clap::Args;

use super::fleet::{FleetArgs, ServerList, parse_servers};
use super::generator::{GeneratorArgs, MAX_SECONDS};
use crate::args::upsample::UpsampleSource;

/// The port of A1111's server, which its clients know.
pub const DEFAULT_PORT: u16 = 7860;

#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub generator: GeneratorArgs,

    /// Another name for a model, for clients that insist on one: `gpt-image-1=klein-4b`; repeatable
    #[arg(long = "model-alias", value_name = "NAME=MODEL", help_heading = "Model", value_parser = model_alias)]
    pub model_aliases: Vec<(String, String)>,

    /// Let clients on other machines download models; those on this machine always may
    #[arg(long, help_heading = "Model")]
    pub allow_downloads: bool,

    /// Let clients train LoRAs, which takes the device between image jobs; with --api-key-file, keys marked `train` or `admin`
    #[arg(long, help_heading = "Model")]
    pub train: bool,

    #[command(flatten)]
    pub upsample: UpsampleSource,

    /// Address to listen on; any other than a loopback address requires --api-key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: std::net::IpAddr,

    /// Port to listen on; 0 picks a free one
    #[arg(short, long, value_name = "N", default_value_t = DEFAULT_PORT, help_heading = "Network")]
    pub port: u16,

    /// Open the page in the browser: that of a server that runs already, or of this one, which takes the next free port if
    /// another program has the default one
    #[arg(long, help_heading = "Network")]
    pub open: bool,

    /// API key that every request must send: at least 16 characters, unless only this machine can reach the server
    #[arg(long, value_name = "KEY", env = "KILN_API_KEY", hide_env_values = true, help_heading = "Network")]
    pub api_key: Option<String>,

    /// File of API keys, one per line: a name, the key, and any of `admin`, `train`, `priority=LEVEL`, `jobs=N`,
    /// `per-minute=N`, `inputs=SIZE`
    #[arg(
        long,
        value_name = "FILE",
        env = "KILN_API_KEY_FILE",
        help_heading = "Network",
        conflicts_with = "api_key"
    )]
    pub api_key_file: Option<PathBuf>,

    /// Certificate chain for HTTPS, as a PEM file; it is read again when it changes
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of the certificate, as a PEM file
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub tls_key: Option<PathBuf>,

    /// Address or network of a proxy whose X-Forwarded-For, -Proto and -Host headers count; repeatable
    #[arg(long = "trusted-proxy", value_name = "ADDRESS", help_heading = "Network")]
    pub trusted_proxies: Vec<kiln_server::Network>,

    /// Let anybody check files at /v1/verify, without an API key: laws may ask services for a public detector
    #[arg(long, help_heading = "Network")]
    pub public_verify: bool,

    /// Root certificate of signers to trust at /v1/verify, besides those of C2PA's list and one's own: PEM; repeatable
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub trust: Vec<PathBuf>,

    /// Host name that browsers may use for this server, besides its address; `*` allows any; repeatable
    #[arg(long = "allow-host", value_name = "NAME", help_heading = "Network", value_parser = host_name)]
    pub hosts: Vec<String>,

    /// Secret that signs webhooks, at least 16 bytes, or `whsec_` and base64; without it jobs can't name one
    #[arg(
        long,
        value_name = "SECRET",
        env = "KILN_WEBHOOK_SECRET",
        hide_env_values = true,
        help_heading = "Network"
    )]
    pub webhook_secret: Option<String>,

    /// Let webhooks call addresses inside the server's own network
    #[arg(long, help_heading = "Network", requires = "webhook_secret")]
    pub webhook_private: bool,

    /// Folder for the queue and the images [default: `server` next to the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_DATA", help_heading = "Limits and storage")]
    pub data: Option<PathBuf>,

    /// Settings file whose table `[serve]` holds options [default: the file of `kiln config`]
    #[arg(long, value_name = "FILE", help_heading = "Limits and storage")]
    pub config: Option<PathBuf>,

    /// Maximum size of the input images that are kept for one client, such as 4G; the oldest are deleted
    #[arg(long, value_name = "SIZE", default_value = "4G", help_heading = "Limits and storage", value_parser = crate::values::parse_bytes)]
    pub max_inputs: u64,

    /// Number of images to keep; the oldest are deleted
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: u32,

    /// Maximum size of all kept images, such as 50G, at least 64M; the oldest are deleted, favourites last [default: none]
    #[arg(long, value_name = "SIZE", help_heading = "Limits and storage", value_parser = gallery_limit)]
    pub gallery_limit: Option<u64>,

    /// Maximum number of queued jobs [default: 64]; or nats://HOST:PORT for a gateway, whose jobs `kiln worker`s generate
    #[arg(long, value_name = "N or URL", help_heading = "Limits and storage", env = "KILN_QUEUE", hide_env_values = true, value_parser = queue)]
    pub queue: Option<QueueArg>,

    /// Maximum number of queued jobs of a gateway
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub queue_length: u32,

    #[command(flatten)]
    pub fleet: FleetArgs,

    /// Seconds after SIGTERM during which the server still answers: `/readyz` says that it is stopping, so that load
    /// balancers send no more requests
    #[arg(long, value_name = "S", default_value_t = 2, help_heading = "Limits and storage", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub linger: u64,
}

/// The queue: its length here, or the servers that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueArg {
    Length(u32),
    Servers(ServerList),
}

fn queue(text: &str) -> Result<QueueArg, String> {
    match text.parse::<u32>() {
        Ok(length @ 1..=10_000) => Ok(QueueArg::Length(length)),
        Ok(_) => Err("expected a number from 1 to 10000".into()),
        Err(_) => parse_servers(text).map(QueueArg::Servers),
    }
}

/// Less would delete images before a client can fetch them.
const MIN_GALLERY: u64 = 64 << 20;

fn gallery_limit(text: &str) -> Result<u64, String> {
    let bytes = crate::values::parse_bytes(text)?;
    let least = || format!("`{text}` is less than 64M");
    (bytes >= MIN_GALLERY).then_some(bytes).ok_or_else(least)
}

/// A host's name as clients send it, without its port.
fn host_name(text: &str) -> Result<String, String> {
    let is_name =
        |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
    let address = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let is_address = address.is_some_and(|text| text.parse::<std::net::Ipv6Addr>().is_ok());
    if text == "*" || is_address || (!text.is_empty() && is_name(text)) {
        return Ok(text.to_owned());
    }
    Err("expected a name such as kiln.home, without a scheme and a port".into())
}

fn model_alias(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(name, model)| !name.is_empty() && !model.is_empty());
    let (name, model) = parts.ok_or("expected NAME=MODEL, such as gpt-image-1=klein-4b")?;
    Ok((name.to_owned(), model.to_owned()))
}

//! What `kiln serve` is told.

use std::path::PathBuf;

use clap::{ArgAction, Args};

use super::MachineArgs;

#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Model to paint with when a request names none: a path, or a name [default: ember]
    #[arg(short, long, value_name = "MODEL", env = "KILN_MODEL", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Folder of the LoRAs that requests may name [default: `loras` beside the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_LORAS", help_heading = "Model")]
    pub loras: Option<PathBuf>,

    /// Autoencoder to use instead of the model's where a request names none: TAEF2, or another FLUX.2 VAE
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// Folder of the autoencoders that requests may name [default: `vaes` beside the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_VAES", help_heading = "Model")]
    pub vaes: Option<PathBuf>,

    /// Autoencoder for previews, such as TAEF2 [default: a projection that is fitted to the model's own]
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub preview_vae: Option<PathBuf>,

    /// Address to listen on; any but this machine's own needs --api-key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: std::net::IpAddr,

    /// Port to listen on; 0 takes any that is free
    #[arg(short, long, value_name = "N", default_value_t = 7860, help_heading = "Network")]
    pub port: u16,

    /// Key that every request has to bring
    #[arg(long, value_name = "KEY", env = "KILN_API_KEY", hide_env_values = true, help_heading = "Network")]
    pub api_key: Option<String>,

    /// Name that browsers may call this server by, beside its address; `*` is any; repeatable
    #[arg(long = "allow-host", value_name = "NAME", help_heading = "Network")]
    pub hosts: Vec<String>,

    /// Folder of the queue and the pictures [default: `server` beside the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_DATA", help_heading = "Limits and storage")]
    pub data: Option<PathBuf>,

    /// Pictures that are kept; the oldest make room
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = "Limits and storage")]
    pub keep: u32,

    /// Requests that may wait
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub queue: u32,

    /// Pictures that are painted at once, of requests that are alike and wait, where that is faster; 1 for one after the other
    #[arg(long, value_name = "N", default_value_t = crate::generate::MAX_BATCH as u32, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub max_batch: u32,

    /// Longest side of a picture, in pixels
    #[arg(long, value_name = "N", default_value_t = 4096, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(16..=16_384))]
    pub max_side: u32,

    /// Most pixels of a picture
    #[arg(long, value_name = "N", default_value_t = 4 << 20, help_heading = "Limits and storage")]
    pub max_pixels: u64,

    /// Most steps
    #[arg(long, value_name = "N", default_value_t = 200, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub max_steps: u32,

    /// Seconds that one request may be painted
    #[arg(long, value_name = "S", default_value_t = 3600, help_heading = "Limits and storage")]
    pub timeout: u64,

    /// Seconds that a picture at work may still take when the server is stopped; then it goes back into the queue
    #[arg(long, value_name = "S", default_value_t = 20, help_heading = "Limits and storage")]
    pub grace: u64,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Don't keep encoded texts on disk, and use none that are there (see `kiln doctor`)
    #[arg(long, help_heading = "Machine")]
    pub no_cache: bool,

    /// Write the log as JSON, an event a line
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Say more
    #[arg(short, long, help_heading = "Output", action = ArgAction::SetTrue)]
    pub verbose: bool,
}

//! Arguments of a fleet: the queue of `kiln serve`, `kiln worker`, `kiln queue` and `kiln workers`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, FromArgMatches, Subcommand};
use kiln_server::fleet::FleetConfig;

use super::{CheckArgs, MachineArgs, ServeArgs};

/// How to reach the queue of a fleet.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Fleet")]
pub struct FleetArgs {
    /// Prefix of the fleet's names on the NATS servers
    #[arg(long, value_name = "NAME", default_value = "kiln", env = "KILN_QUEUE_PREFIX")]
    pub queue_prefix: String,

    /// File with credentials for NATS (a JWT and its seed)
    #[arg(long, value_name = "FILE", env = "KILN_QUEUE_CREDENTIALS")]
    pub queue_credentials: Option<PathBuf>,

    /// File with the seed of an NKey for NATS
    #[arg(long, value_name = "FILE", env = "KILN_QUEUE_NKEY")]
    pub queue_nkey: Option<PathBuf>,

    /// Certificate authority of the NATS servers, as a PEM file
    #[arg(long, value_name = "FILE")]
    pub queue_ca: Option<PathBuf>,

    /// Certificate to show to the NATS servers, as a PEM file
    #[arg(long, value_name = "FILE", requires = "queue_key")]
    pub queue_cert: Option<PathBuf>,

    /// Private key of that certificate
    #[arg(long, value_name = "FILE", requires = "queue_cert")]
    pub queue_key: Option<PathBuf>,

    /// Seconds that a worker may be silent before its job goes to another one; the same for the whole fleet
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub ack_wait: u32,

    /// Copies of everything on a cluster of NATS servers, when its streams are created
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=5))]
    pub queue_replicas: u32,

    /// Name of this process in lists and logs [default: the machine's name]
    #[arg(long, value_name = "NAME", env = "KILN_NODE_NAME")]
    pub node_name: Option<String>,
}

impl FleetArgs {
    /// The configuration for these servers.
    pub fn config(&self, servers: &[String]) -> FleetConfig {
        FleetConfig {
            prefix: self.queue_prefix.clone(),
            credentials: self.queue_credentials.clone(),
            nkey: self.queue_nkey.clone(),
            authority: self.queue_ca.clone(),
            certificate: self.queue_cert.clone().zip(self.queue_key.clone()),
            ack_wait: Duration::from_secs(self.ack_wait.into()),
            replicas: self.queue_replicas as usize,
            name: self.node_name.clone().unwrap_or_else(machine_name),
            ..FleetConfig::new(servers.to_vec())
        }
    }
}

fn machine_name() -> String {
    let named = std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    let file = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    named.or_else(file).map_or_else(|| "kiln".into(), |name| name.trim().to_owned())
}

/// Parses the addresses of NATS servers.
pub fn parse_servers(text: &str) -> Result<Vec<String>, String> {
    let servers: Vec<String> = text.split(',').map(str::to_owned).collect();
    let is_url = |server: &String| server.starts_with("nats://") || server.starts_with("tls://");
    match servers.iter().find(|server| !is_url(server)) {
        Some(wrong) => Err(format!("`{wrong}` is no address of a NATS server, such as nats://queue:4222")),
        None => Ok(servers),
    }
}

/// Where the queue is, for commands that need one.
#[derive(Clone, Debug, Args)]
pub struct QueueAddress {
    /// NATS servers that hold the queue: nats://HOST:PORT or tls://HOST:PORT; several with commas
    #[arg(long = "queue", value_name = "URL", env = "KILN_QUEUE", hide_env_values = true, value_parser = parse_list)]
    pub servers: ServerList,

    #[command(flatten)]
    pub fleet: FleetArgs,
}

/// Addresses of NATS servers.
#[derive(Clone, Debug)]
pub struct ServerList(pub Vec<String>);

fn parse_list(text: &str) -> Result<ServerList, String> {
    parse_servers(text).map(ServerList)
}

#[derive(Clone, Debug, Args)]
pub struct WorkerArgs {
    #[command(flatten)]
    pub queue: QueueAddress,

    /// Default model: a path or a name; the others of the models folder are announced, too
    #[arg(short, long, value_name = "MODEL", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Download the model without asking if it is not there
    #[arg(short, long, help_heading = "Model")]
    pub yes: bool,

    /// Load this model at startup, besides the default one; repeatable
    #[arg(long, value_name = "MODEL", help_heading = "Model", requires = "model_memory")]
    pub preload: Vec<String>,

    /// Keep several models loaded while their files have at most this size together, such as 20G
    #[arg(long, value_name = "SIZE", help_heading = "Model", value_parser = crate::values::parse_bytes)]
    pub model_memory: Option<u64>,

    /// Folder with the LoRAs that requests may name [default: `loras` next to the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_LORAS", help_heading = "Model")]
    pub loras: Option<PathBuf>,

    /// Default autoencoder, instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// Folder with the autoencoders that requests may name [default: `vaes` next to the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_VAES", help_heading = "Model")]
    pub vaes: Option<PathBuf>,

    /// Autoencoder for previews, such as TAEF2
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub preview_vae: Option<PathBuf>,

    /// Step cache for jobs that name no `cache`, as for `kiln serve`
    #[arg(long, value_name = "THRESHOLD", help_heading = "Model", num_args = 0..=1, default_missing_value = "0.1", value_parser = kiln_engine::cache_threshold)]
    pub cache: Option<f32>,

    /// Maximum batch size; 1 disables batching
    #[arg(long, value_name = "N", default_value_t = crate::generate::MAX_BATCH as u32, help_heading = "Limits", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub max_batch: u32,

    /// Maximum side of an image, in pixels; as on the gateways
    #[arg(long, value_name = "N", default_value_t = 4096, help_heading = "Limits", value_parser = clap::value_parser!(u32).range(16..=16_384))]
    pub max_side: u32,

    /// Maximum number of pixels of an image; as on the gateways
    #[arg(long, value_name = "N", default_value_t = 4 << 20, help_heading = "Limits")]
    pub max_pixels: u64,

    /// Maximum number of steps; as on the gateways
    #[arg(long, value_name = "N", default_value_t = 200, help_heading = "Limits", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub max_steps: u32,

    /// Maximum seconds for generating one job
    #[arg(long, value_name = "S", default_value_t = 3600, help_heading = "Limits")]
    pub timeout: u64,

    /// Seconds to let running jobs finish after SIGTERM; others take over what is unfinished
    #[arg(long, value_name = "S", default_value_t = 20, help_heading = "Limits")]
    pub grace: u64,

    /// Leave recipes out of the image files
    #[arg(long, help_heading = "Limits")]
    pub no_recipe: bool,

    /// Address for /healthz, /readyz and /metrics, such as 0.0.0.0:9090 [default: none]
    #[arg(long, value_name = "ADDRESS", help_heading = "Network")]
    pub metrics: Option<SocketAddr>,

    #[command(flatten)]
    pub check: CheckArgs,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Don't use the on-disk cache of encoded texts (see `kiln doctor`)
    #[arg(long, help_heading = "Machine")]
    pub no_cache: bool,

    /// Write the log as JSON, one event per line
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Log more details
    #[arg(short, long, help_heading = "Output", action = ArgAction::SetTrue)]
    pub verbose: bool,
}

impl WorkerArgs {
    /// The options of a server that generates as this worker does.
    pub fn serve_args(&self) -> ServeArgs {
        let defaults = ServeArgs::augment_args(clap::Command::new("serve")).get_matches_from(["serve"]);
        // Every option has a default.
        let defaults = ServeArgs::from_arg_matches(&defaults).unwrap_or_else(|error| error.exit());
        let worker = self.clone();
        ServeArgs {
            model: worker.model,
            yes: worker.yes,
            preload: worker.preload,
            model_memory: worker.model_memory,
            loras: worker.loras,
            vae: worker.vae,
            vaes: worker.vaes,
            preview_vae: worker.preview_vae,
            cache: worker.cache,
            max_batch: worker.max_batch,
            max_side: worker.max_side,
            max_pixels: worker.max_pixels,
            max_steps: worker.max_steps,
            timeout: worker.timeout,
            grace: worker.grace,
            no_recipe: worker.no_recipe,
            check: worker.check,
            machine: worker.machine,
            no_cache: worker.no_cache,
            json: worker.json,
            verbose: worker.verbose,
            api_key: None,
            api_key_file: None,
            queue: None,
            ..defaults
        }
    }
}

#[derive(Clone, Debug, Args)]
pub struct QueueArgs {
    #[command(flatten)]
    pub queue: QueueAddress,

    #[command(subcommand)]
    pub command: QueueCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub enum QueueCommand {
    /// List the unfinished jobs
    List {
        /// Print JSON, one job per line
        #[arg(long)]
        json: bool,
    },
    /// List the dead letters: jobs that killed two workers or failed three times
    Dead {
        /// Print JSON, one job per line
        #[arg(long)]
        json: bool,
    },
    /// Show the record of a job, finished or not
    Show {
        /// The job's id
        id: String,
    },
    /// Try failed jobs again
    Retry {
        /// Their ids
        #[arg(required_unless_present = "all")]
        ids: Vec<String>,
        /// Every dead letter
        #[arg(long)]
        all: bool,
    },
    /// Cancel unfinished jobs, or with --dead delete dead letters
    Purge {
        /// Their ids
        #[arg(required_unless_present = "all")]
        ids: Vec<String>,
        /// All of them
        #[arg(long)]
        all: bool,
        /// Delete dead letters
        #[arg(long)]
        dead: bool,
    },
}

#[derive(Clone, Debug, Args)]
pub struct WorkersArgs {
    #[command(flatten)]
    pub queue: QueueAddress,

    /// Print JSON, one process per line
    #[arg(long)]
    pub json: bool,
}

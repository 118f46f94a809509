//! Arguments of a fleet: the queue of `kiln serve`, `kiln worker`, `kiln queue` and `kiln workers`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use kiln_server::fleet::{FleetConfig, GiveUp, S3Config};

use super::generator::GeneratorArgs;

const WORKER_EXAMPLES: &str = "\
Examples:
  kiln serve  --queue nats://queue:4222              (a gateway: APIs, page, gallery)
  kiln worker --queue nats://queue:4222 -m klein-4b  (as many as you like, anywhere)
  kiln worker --queue tls://queue:4222 --queue-credentials kiln.creds --device cuda:0,cuda:1 --metrics 0.0.0.0:9090";

const QUEUE_EXAMPLES: &str = "\
Examples:
  kiln queue --queue nats://queue:4222 list
  kiln queue --queue nats://queue:4222 dead
  kiln queue --queue nats://queue:4222 retry --all";

/// The commands of a fleet.
#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// Generate the jobs of a fleet's queue on this machine
    #[command(after_help = WORKER_EXAMPLES, args_override_self = true)]
    Worker(Box<WorkerArgs>),
    /// List, show, retry and purge the jobs of a fleet's queue
    #[command(after_help = QUEUE_EXAMPLES)]
    Queue(Box<QueueArgs>),
    /// List the gateways and workers of a fleet
    Workers(Box<WorkersArgs>),
}

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

    /// Workers that may be lost while they run a job before it is given up; the same for the whole fleet
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub max_lost_workers: u32,

    /// Errors of workers before a job is given up; the same for the whole fleet
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub max_failures: u32,

    /// Copies of everything on a cluster of NATS servers, when its streams are created
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=5))]
    pub queue_replicas: u32,

    /// Bucket for inputs and images in place of the NATS servers: s3://BUCKET or s3://BUCKET/PREFIX, with the AWS_*
    /// variables of the AWS tools; the same for the whole fleet
    #[arg(long, value_name = "URL", env = "KILN_QUEUE_FILES")]
    pub queue_files: Option<String>,

    /// Name of this process in lists and logs [default: the machine's name]
    #[arg(long, value_name = "NAME", env = "KILN_NODE_NAME")]
    pub node_name: Option<String>,
}

impl FleetArgs {
    /// The configuration for these servers.
    pub fn config(&self, servers: &ServerList) -> FleetConfig {
        FleetConfig {
            prefix: self.queue_prefix.clone(),
            credentials: self.queue_credentials.clone(),
            nkey: self.queue_nkey.clone(),
            authority: self.queue_ca.clone(),
            certificate: self.queue_cert.clone().zip(self.queue_key.clone()),
            ack_wait: Duration::from_secs(self.ack_wait.into()),
            give_up: GiveUp { lost_workers: self.max_lost_workers, failures: self.max_failures },
            replicas: self.queue_replicas as usize,
            s3: self.queue_files.as_deref().map(S3Config::from_env),
            name: self.node_name.clone().filter(|name| !name.is_empty()).unwrap_or_else(machine_name),
            ..FleetConfig::new(servers.0.clone())
        }
    }
}

fn machine_name() -> String {
    let named = std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    let file = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    named.or_else(file).map_or_else(|| "kiln".into(), |name| name.trim().to_owned())
}

/// Parses the addresses of NATS servers.
pub fn parse_servers(text: &str) -> Result<ServerList, String> {
    let servers: Vec<String> = text.split(',').map(str::to_owned).collect();
    let is_url = |server: &String| server.starts_with("nats://") || server.starts_with("tls://");
    match servers.iter().find(|server| !is_url(server)) {
        Some(wrong) => Err(format!("`{wrong}` is no address of a NATS server, such as nats://queue:4222")),
        None => Ok(ServerList(servers)),
    }
}

/// Where the queue is, for commands that need one.
#[derive(Clone, Debug, Args)]
pub struct QueueAddress {
    /// NATS servers that hold the queue: nats://HOST:PORT or tls://HOST:PORT; several with commas
    #[arg(long = "queue", value_name = "URL", env = "KILN_QUEUE", hide_env_values = true, value_parser = parse_servers)]
    pub servers: ServerList,

    #[command(flatten)]
    pub fleet: FleetArgs,
}

/// Addresses of NATS servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerList(pub Vec<String>);

#[derive(Clone, Debug, Args)]
pub struct WorkerArgs {
    #[command(flatten)]
    pub queue: QueueAddress,

    /// Address for /healthz, /readyz and /metrics, such as 0.0.0.0:9090 [default: none]
    #[arg(long, value_name = "ADDRESS", help_heading = "Network")]
    pub metrics: Option<SocketAddr>,

    #[command(flatten)]
    pub generator: GeneratorArgs,
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
    /// List the dead letters: jobs that were given up
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

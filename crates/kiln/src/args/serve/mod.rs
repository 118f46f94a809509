//! Arguments of `kiln serve`, and of the fleet that it may be a part of.

// A program without fleets has neither their commands nor their options.
#[cfg_attr(not(feature = "fleet"), path = "no_fleet.rs")]
mod fleet;
mod generator;
mod server;

use std::path::Path;

use clap::{Args, Command, Subcommand};

pub use fleet::*;
pub use generator::GeneratorArgs;
pub use server::{DEFAULT_PORT, QueueArg, ServeArgs};

const SERVE_EXAMPLES: &str = "\
Examples:
  kiln serve                                         (web page at http://127.0.0.1:7860, with the built-in Ember)
  kiln serve -m models/klein-4b --preview-vae taef2.safetensors
  KILN_API_KEY=... kiln serve --host 0.0.0.0 --allow-host kiln.home
  kiln serve --config kiln.toml                      (options from a file, in its table [serve])
  kiln serve --device cuda:0,cuda:1                  (several GPUs, one queue)
  kiln serve --queue nats://queue:4222               (a gateway of several machines, see `kiln worker`)

OpenAI clients use http://127.0.0.1:7860/v1, A1111 clients http://127.0.0.1:7860; /openapi.json describes every route.
Images, their recipes and the queue are stored in the data folder. Ctrl-C lets running jobs finish (see --grace), a
second Ctrl-C stops at once; unfinished jobs resume at the next start.";

/// The commands of the server.
#[derive(Debug, Subcommand)]
pub enum ServeCommand {
    /// Run an HTTP server with a web page and APIs
    #[command(after_help = SERVE_EXAMPLES, args_override_self = true)]
    Serve(Box<ServeArgs>),
    #[command(flatten)]
    Fleet(FleetCommand),
}

impl ServeCommand {
    /// The settings file that an option names.
    pub fn config(&self) -> Option<&Path> {
        match self {
            ServeCommand::Serve(args) => args.config.as_deref(),
            ServeCommand::Fleet(_) => None,
        }
    }
}

/// The parser of `kiln serve`'s options, for the settings file.
pub fn serve_options() -> Option<Command> {
    Some(ServeArgs::augment_args(Command::new("serve")).no_binary_name(true))
}

/// `kiln bench` through a server.
#[derive(Clone, Debug, Args)]
pub struct BenchServerArgs {
    /// Measure whole requests through a local server: one after the other, then many at once
    #[arg(long, conflicts_with_all = ["phases", "peaks", "loras", "refs", "batch", "report"])]
    pub server: bool,
}

//! The command line, parsed by clap. The options that say what to generate are the fields of the engine's [`Request`].

mod bench;
mod check;
mod components;
mod config;
mod credentials;
mod examples;
mod files;
mod generate;
mod hub;
mod machine;
// What the program can't do without the server has no options.
#[cfg_attr(not(feature = "serve"), path = "no_serve.rs")]
mod serve;
mod sign;
mod size;
mod train;
mod upsample;
mod upscale;
mod verify;
mod watermark;

use std::path::PathBuf;

use clap::{Arg, Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

pub use bench::{BenchArgs, PhaseArg, SizeArg, StoredArg};
pub use check::CheckArgs;
pub use components::ComponentArgs;
pub use config::{ConfigArgs, ConfigCommand};
pub use credentials::{CredentialsArgs, CredentialsCommand};
pub use files::{ConvertArgs, FloatTypeArg, NamingArg, QuantizeArgs};
pub use generate::{GenerateArgs, PreviewArg};
pub use hub::{ModelsArgs, PullArgs, RmArgs};
pub use machine::{MachineArgs, ThreadArgs};
pub use serve::*;
pub use sign::SignArgs;
pub use size::Aspect;
pub use train::TrainArgs;
pub use upsample::{UpsampleArgs, UpsampleSource};
pub use upscale::UpscaleArgs;
pub use verify::VerifyArgs;
pub use watermark::WatermarkArgs;

use examples::*;

const ABOUT: &str = "Generate and edit images with the FLUX.2 models";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "kiln", version, about = ABOUT, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    /// None: what to do next is printed.
    #[command(subcommand)]
    pub command: Option<Command>,
}

impl Cli {
    /// The command line's parser. A negative number after an option is its value: `--steps -1` is a wrong number of
    /// steps, not an unknown option `-1`.
    pub fn parser() -> clap::Command {
        fn with_numbers(command: clap::Command) -> clap::Command {
            let option = |arg: Arg| {
                let takes_value = arg.get_action().takes_values() && arg.get_long().is_some();
                if takes_value { arg.allow_negative_numbers(true) } else { arg }
            };
            command.mut_args(option).mut_subcommands(with_numbers)
        }
        with_numbers(Cli::command())
    }
}

/// A subcommand.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate images; a prompt of `-` is read from standard input
    #[command(
        visible_alias = "run",
        after_help = format!("{OTHER_NAMES}\n\n{GENERATE_EXAMPLES}"),
        args_override_self = true
    )]
    Generate(Box<GenerateArgs>),
    /// Enlarge an image by 2 or 4: the model refines it tile by tile
    #[command(after_help = UPSCALE_EXAMPLES, args_override_self = true)]
    Upscale(Box<UpscaleArgs>),
    /// Train a LoRA on images with captions, or on pairs for editing
    #[command(after_help = TRAIN_EXAMPLES, args_override_self = true)]
    Train(Box<TrainArgs>),
    #[command(flatten)]
    Serve(ServeCommand),
    /// Download a model from Hugging Face
    #[command(after_help = PULL_EXAMPLES, args_override_self = true)]
    Pull(PullArgs),
    /// List the models that can be used by name
    #[command(visible_alias = "list", args_override_self = true)]
    Models(ModelsArgs),
    /// Remove a downloaded model, or one in the models folder
    #[command(args_override_self = true)]
    Rm(RmArgs),
    /// Convert a component of a model: tensor names, data type, file format
    #[command(after_help = CONVERT_EXAMPLES, args_override_self = true)]
    Convert(ConvertArgs),
    /// Quantize a model
    #[command(after_help = QUANTIZE_EXAMPLES, args_override_self = true)]
    Quantize(QuantizeArgs),
    /// Describe a model, a weight file, or an image and its recipe
    #[command(visible_alias = "show", args_override_self = true)]
    Info(InfoArgs),
    /// Check the credentials of images (C2PA): who signed them, and whether they have changed since
    #[command(after_help = VERIFY_EXAMPLES, args_override_self = true)]
    Verify(VerifyArgs),
    /// Make and show the key that `--sign` signs images with (C2PA)
    Credentials(CredentialsArgs),
    /// Show or change the settings file, which holds defaults for options
    #[command(after_help = CONFIG_EXAMPLES)]
    Config(ConfigArgs),
    /// Show this machine's CPU, GPUs, memory and folders
    #[command(args_override_self = true)]
    Doctor(DoctorArgs),
    /// Measure how fast this machine runs a model, with real or synthetic weights
    #[command(after_help = BENCH_EXAMPLES, args_override_self = true)]
    Bench(Box<BenchArgs>),
    /// Ask whether there is a newer release; Kiln never asks by itself
    #[command(args_override_self = true)]
    Update(UpdateArgs),
    /// Show Kiln's files and folders, their sizes, and how to delete them
    #[command(args_override_self = true)]
    Uninstall(UninstallArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages into a folder
    Man {
        /// The folder, such as ~/.local/share/man/man1
        folder: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct InfoArgs {
    /// A folder, a file, or the name of a model
    pub path: PathBuf,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Write a file for a bug report: this, the settings and the models, without secrets and names of users; `-` prints it
    /// [default: kiln-report.txt]
    #[arg(long, value_name = "FILE")]
    pub report: Option<Option<PathBuf>>,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct UpdateArgs {
    /// Ask for the latest release, and compare it with this program
    #[arg(long)]
    pub check: bool,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct UninstallArgs {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::Command;
    use clap::error::ErrorKind;

    use super::*;

    /// Calls `check` with the names and the parser of every command.
    fn every_command(command: &Command, names: &[String], check: &dyn Fn(&Command, &[String])) {
        let names = [names, &[command.get_name().to_owned()]].concat();
        check(command, &names);
        command.get_subcommands().for_each(|inner| every_command(inner, &names, check));
    }

    #[test]
    fn a_negative_number_is_the_value_of_every_option() {
        every_command(&Cli::parser(), &[], &|command, names| {
            for option in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
                let Some(long) = option.get_long() else { continue };
                let given = [names, &[format!("--{long}"), "-1".to_owned()]].concat();
                let kind = Cli::parser().try_get_matches_from(&given).err().map(|error| error.kind());
                let needs_equals = option.is_require_equals_set();
                assert!(needs_equals || kind != Some(ErrorKind::UnknownArgument), "{given:?}: {kind:?}");
            }
        });
    }

    /// clap replaces `{n}` in help texts by a line break.
    #[test]
    fn no_help_text_has_a_placeholder_that_clap_replaces() {
        every_command(&Cli::parser(), &[], &|command, names| {
            let of_options = command.get_arguments().flat_map(|arg| [arg.get_help(), arg.get_long_help()]);
            let of_command = [command.get_about(), command.get_after_help(), command.get_before_help()];
            for text in of_options.chain(of_command).flatten() {
                assert!(!text.to_string().contains("{n}"), "{names:?}: {text}");
            }
        });
    }
}

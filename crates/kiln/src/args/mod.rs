//! The command line, parsed by clap. The options that say what to generate are the fields of the engine's [`Request`].

mod bench;
mod check;
mod config;
mod files;
#[cfg(feature = "fleet")]
mod fleet;
#[cfg(feature = "serve")]
mod generator;
mod hub;
mod machine;
#[cfg(feature = "serve")]
mod serve;
mod train;
mod upsample;
mod upscale;

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kiln_engine::{ComponentPaths, Request};
use kiln_family::Variant;

pub use bench::{BenchArgs, PhaseArg, SizeArg, StoredArg};
pub use check::CheckArgs;
pub use config::{ConfigArgs, ConfigCommand};
pub use files::{ConvertArgs, FloatTypeArg, NamingArg, QuantizeArgs};
#[cfg(feature = "fleet")]
pub use fleet::{FleetArgs, QueueAddress, QueueArgs, QueueCommand, WorkerArgs, WorkersArgs};
#[cfg(feature = "serve")]
pub use generator::GeneratorArgs;
pub use hub::{ModelsArgs, PullArgs, RmArgs};
pub use machine::{MAX_THREADS, MachineArgs, ThreadArgs};
#[cfg(feature = "serve")]
pub use serve::{QueueArg, ServeArgs};
pub use train::TrainArgs;
pub use upsample::{UpsampleArgs, UpsampleSource};
pub use upscale::UpscaleArgs;

const ABOUT: &str = "Generate and edit images with the FLUX.2 models";

const EXAMPLES: &str = "\
Examples:
  kiln generate \"a red apple on a blue background\"
  kiln generate \"a red fox in the snow\" -m models/klein-4b
  kiln generate \"make it night\" -m models/klein-4b -r house.jpg -o night.png
  kiln generate --from night.png -S 7
  kiln pull klein-4b
  kiln serve
  kiln train images/ -m klein-base-4b -o me.safetensors --trigger \"sks dog\"
  kiln quantize models/klein-4b models/klein-4b-int8 --to int8
  kiln info models/klein-4b
  kiln config set model klein-4b
  kiln bench --peaks
  kiln doctor";

const GENERATE_EXAMPLES: &str = "\
Examples:
  kiln generate \"a red apple on a blue background\"                 (with Ember, the built-in model)
  kiln generate \"a red fox in the snow\" -m models/klein-4b -W 768 -H 512 -S 42
  kiln generate \"a red fox in the snow\" -m flux-2-klein-4b-Q4_K_M.gguf --text-encoder qwen_3_4b.safetensors
  kiln generate \"the same chair, in green\" -m models/klein-4b -r chair.jpg -r swatch.png
  kiln generate \"a round window\" -m models/klein-4b --init wall.png --mask mask.png
  kiln generate \"an owl\" -m models/klein-base -n \"blurry\" -g 4 --lora ink.safetensors:0.8
  kiln generate \"a fox\" \"a hen\" -m models/klein-4b -b 2 -o farm.png    (farm-1.png … farm-4.png)
  kiln generate \"a {red|blue} {fox|hen}\" -b 4 -o farm/                (four prompts, four files in farm/)
  kiln generate --prompt-file prompts.txt -o \"{number}-{prompt}-{seed}.jpg\" --quality 85
  echo \"a red fox\" | kiln generate - -m models/klein-4b -o - > fox.png
  kiln generate --from fox.png -W 512                               (the same again, but wider)";

const OTHER_NAMES: &str = "\
Names of other programs that work, too: -p, --prompt PROMPT; --negative-prompt (-n); --cfg-scale, --guidance-scale (-g);
--num-inference-steps (-s); --batch-count, --num-images-per-prompt (-b); --ref-image (-r); -i, --init-img, --init-image
(--init); --diffusion-model (--transformer); --llm (--text-encoder)";

const UPSCALE_EXAMPLES: &str = "\
The prompt helps the model to choose detail. Without one, that of the image's recipe is used, and the recipe's model
unless -m names another.

Examples:
  kiln upscale fox.png                                              (writes fox-2x.png)
  kiln upscale photo.jpg --scale 4 -m models/klein-4b -p \"a market square at dawn\" -o poster.png
  kiln upscale scan.png -m models/klein-4b --strength 0.2           (stays closer to the image)";

const TRAIN_EXAMPLES: &str = "\
Examples:
  kiln train images/ -m klein-base-4b -o me.safetensors --trigger \"sks dog\"
  kiln generate \"sks dog on the moon\" -m klein-4b --lora me.safetensors
  kiln train images/ -m klein-base-4b -o ink.safetensors --targets style --sample-every 250 --sample-model klein-4b
  kiln train edits/ -m klein-base-4b -o night.safetensors --reference-dropout 0.1    (edits/before, edits/after)
  kiln train images/ -m klein-base-4b -o me.safetensors --resume                 (continues, to the bit)
  kiln train images/ -m klein-base-4b -o me.safetensors --dry-run                (checks images, tells the cost)";

const BENCH_EXAMPLES: &str = "\
Examples:
  kiln bench                                         (klein 4B, 512x512, synthetic weights)
  kiln bench --synthetic 9b-kv --size 1024x1024 --refs 2 --dtype bf16
  kiln bench -m models/klein-4b --phase step --repeat 5 -v
  kiln bench --peaks                                 (the machine's peak rates)

Every phase starts with a warm-up run that does not count. In the tables, `share` is the share of the phase's time,
`of peak` compares an operation's rate with the machine's peak, and `beyond weights` is the memory in use without the
weights.";

const PULL_EXAMPLES: &str = "\
Names: klein-4b, klein-9b, klein-base-4b, klein-base-9b, klein-9b-kv, with the suffix -fp8, -nvfp4 or -gguf where such a
repository exists; dev, dev-fp8, dev-nvfp4, dev-gguf:TYPE and dev-encoder; small-decoder; any OWNER/REPO.

Models are stored in the Hugging Face cache, which other programs share (HF_HOME, HF_HUB_CACHE). An interrupted download
resumes where it stopped. Gated models require the access token of an account that has accepted their terms, in HF_TOKEN
or from `huggingface-cli login`. A licence with conditions (dev, klein 9B) must be accepted here, too.
HF_ENDPOINT sets another hub or a mirror, with or without a path.

Examples:
  kiln pull klein-4b
  kiln generate \"a red fox in the snow\" -m klein-4b
  kiln pull klein-4b-gguf:Q4_K_M
  kiln pull dev-gguf:Q4_K_S --accept-license         (with the text encoder and the VAE that it lacks)
  kiln pull someone/some-style:*.safetensors";

const CONFIG_EXAMPLES: &str = "\
Settings: model, models_folder, output_folder, device, dtype, threads, vram_limit, cache; and serve.NAME, where NAME is any long
option of `kiln serve`, such as serve.port. An option comes before the environment (KILN_MODEL, KILN_MODELS), the
environment before the file, the file before what is built in.

Examples:
  kiln config                                        (every setting, and where its value comes from)
  kiln config set model klein-4b
  kiln config set output_folder ~/Pictures/kiln
  kiln config set serve.port 8080
  kiln config unset model";

const CONVERT_EXAMPLES: &str = "\
Examples:
  kiln convert models/klein-4b klein-4b.safetensors                  (one file, as for ComfyUI)
  kiln convert flux-2-klein-4b.safetensors transformer               (a folder, as for diffusers)
  kiln convert klein-4b-Q6_K.gguf klein-4b-bf16.safetensors --dtype bf16
  kiln convert models/klein-4b vae.safetensors --part vae --names diffusers";

#[cfg(feature = "serve")]
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

#[cfg(feature = "fleet")]
const WORKER_EXAMPLES: &str = "\
Examples:
  kiln serve  --queue nats://queue:4222              (a gateway: APIs, page, gallery)
  kiln worker --queue nats://queue:4222 -m klein-4b  (as many as you like, anywhere)
  kiln worker --queue tls://queue:4222 --queue-credentials kiln.creds --device cuda:0,cuda:1 --metrics 0.0.0.0:9090";

#[cfg(feature = "fleet")]
const QUEUE_EXAMPLES: &str = "\
Examples:
  kiln queue --queue nats://queue:4222 list
  kiln queue --queue nats://queue:4222 dead
  kiln queue --queue nats://queue:4222 retry --all";

const QUANTIZE_EXAMPLES: &str = "\
Quantizes the linear layers inside the blocks, copies everything else, and reports the error of each kind of layer.
With int8, `generate` computes in 8-bit integers (--dtype f32 or bf16 dequantizes them; --dtype int8 quantizes any model
for a single run). The other types stay packed in memory and are dequantized inside the matrix products.

Examples:
  kiln quantize models/klein-4b models/klein-4b-int8 --to int8
  kiln generate \"a red fox in the snow\" -m models/klein-4b-int8
  kiln quantize models/klein-4b klein-4b-Q4_K.gguf --to q4_k
  kiln quantize models/klein-4b qwen3-4b-Q6_K.gguf --to q6_k --part text-encoder
  kiln quantize flux-2-klein-4b.safetensors klein-4b-fp8.safetensors --to fp8";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "kiln", version, about = ABOUT, after_help = EXAMPLES, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
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
    /// Run an HTTP server with a web page and APIs
    #[cfg(feature = "serve")]
    #[command(after_help = SERVE_EXAMPLES, args_override_self = true)]
    Serve(Box<ServeArgs>),
    /// Generate the jobs of a fleet's queue on this machine
    #[cfg(feature = "fleet")]
    #[command(after_help = WORKER_EXAMPLES, args_override_self = true)]
    Worker(Box<WorkerArgs>),
    /// List, show, retry and purge the jobs of a fleet's queue
    #[cfg(feature = "fleet")]
    #[command(after_help = QUEUE_EXAMPLES)]
    Queue(Box<QueueArgs>),
    /// List the gateways and workers of a fleet
    #[cfg(feature = "fleet")]
    Workers(Box<WorkersArgs>),
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
    /// Show or change the settings file, which holds defaults for options
    #[command(after_help = CONFIG_EXAMPLES)]
    Config(ConfigArgs),
    /// Show this machine's CPU, GPUs, memory and folders
    #[command(args_override_self = true)]
    Doctor(DoctorArgs),
    /// Measure how fast this machine runs a model, with real or synthetic weights
    #[command(after_help = BENCH_EXAMPLES, args_override_self = true)]
    Bench(Box<BenchArgs>),
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

#[derive(Debug, Default, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub request: Request,

    #[arg(
        short = 'p',
        long = "prompt",
        value_name = "PROMPT",
        hide = true,
        allow_hyphen_values = true,
        conflicts_with = "embeds"
    )]
    pub more_prompts: Vec<String>,

    /// File of prompts: one per line, or JSON lines with the fields of a request (`prompt`, `seed`, `width` …)
    #[arg(long, value_name = "FILE", conflicts_with = "embeds")]
    pub prompt_file: Option<PathBuf>,

    /// Folder of lists for wildcards: `__animal__` in a prompt becomes a line of animal.txt, as the seed chooses;
    /// `{fox|hen}` needs no folder
    #[arg(long, value_name = "DIR")]
    pub wildcards: Option<PathBuf>,

    #[command(flatten)]
    pub upsample: UpsampleArgs,

    /// Width and height in pixels
    #[arg(
        long, value_name = "WxH", help_heading = "Image", conflicts_with_all = ["width", "height"],
        value_parser = crate::generate::parse_size
    )]
    pub size: Option<(u32, u32)>,

    /// Aspect ratio such as 16:9, with about as many pixels as the default size, or for the given -W or -H
    #[arg(
        long, alias = "aspect-ratio", value_name = "W:H", help_heading = "Image", conflicts_with = "size",
        value_parser = crate::generate::Aspect::parse
    )]
    pub aspect: Option<crate::generate::Aspect>,

    /// Generate an image again from the recipe stored in it; other options override the recipe
    #[arg(long, value_name = "IMAGE")]
    pub from: Option<PathBuf>,

    #[command(flatten)]
    pub components: ComponentArgs,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Download a model that is not there without asking
    #[arg(short, long, help_heading = "Model")]
    pub yes: bool,

    /// Don't use the on-disk cache of encoded texts (see `kiln doctor`)
    #[arg(long, help_heading = "Machine")]
    pub no_cache: bool,

    /// Output: a .png, .jpg or .webp file, a folder (`DIR/`), a name with {prompt}, {seed}, {number}, {date},
    /// {time}, {model}, {width}, {height} or {steps} in it, or `-` for standard output [default: {prompt}-{seed}.png]
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// Also write the final packed latents, as safetensors with a tensor `latents`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub latents_out: Option<PathBuf>,

    /// Store absolute paths in the recipe instead of paths relative to the image
    #[arg(long, help_heading = "Output")]
    pub absolute_paths: bool,

    /// Don't store the recipe (prompt, seed, paths, …) in the image
    #[arg(long, help_heading = "Output")]
    pub no_recipe: bool,

    #[command(flatten)]
    pub check: CheckArgs,

    /// Show the image in the terminal, from the first step on; =kitty, =iterm2, =sixel or =blocks selects the protocol.
    /// Nothing is shown in pipes
    #[arg(
        long, value_name = "PROTOCOL", help_heading = "Output", num_args = 0..=1, require_equals = true,
        default_missing_value = "auto"
    )]
    pub preview: Option<PreviewArg>,

    /// Print progress as JSON, one event per line
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Print only errors
    #[arg(short, long, help_heading = "Output", conflicts_with = "verbose")]
    pub quiet: bool,

    /// Print more details
    #[arg(short, long, help_heading = "Output", action = ArgAction::SetTrue)]
    pub verbose: bool,
}

/// Components that replace the model's own.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ComponentArgs {
    /// Transformer to use instead of the model's, or as the model
    #[arg(long, alias = "diffusion-model", value_name = "PATH")]
    pub transformer: Option<PathBuf>,

    /// Text encoder to use instead of the model's
    #[arg(long, alias = "llm", value_name = "PATH")]
    pub text_encoder: Option<PathBuf>,

    /// Tokenizer to use instead of the model's: tokenizer.json, or a folder with it
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,

    /// Variant of the model, if neither model_index.json nor the name tells it
    #[arg(long, value_name = "VARIANT", value_parser = variants())]
    pub variant: Option<Variant>,
}

/// Parses the name of a variant.
fn variants() -> impl TypedValueParser<Value = Variant> {
    let values = kiln_family::variants().map(|variant| {
        let is_offered = !variant.family.models.is_empty();
        PossibleValue::new(variant.name).help(variant.summary).hide(!is_offered)
    });
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Variant>())
}

impl ComponentArgs {
    pub fn paths(&self) -> ComponentPaths {
        ComponentPaths {
            transformer: self.transformer.clone(),
            text_encoder: self.text_encoder.clone(),
            vae: None,
            tokenizer: self.tokenizer.clone(),
            variant: self.variant,
            ..ComponentPaths::default()
        }
    }
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
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

/// A protocol for showing images in the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PreviewArg {
    Auto,
    Kitty,
    Iterm2,
    Sixel,
    Blocks,
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

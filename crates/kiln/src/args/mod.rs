//! The command line, as clap reads it. What to generate is the engine's own [`Request`].

mod bench;
mod files;
mod hub;
mod machine;
#[cfg(feature = "serve")]
mod serve;

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kiln_engine::{Parts, Request, Variant};

pub use bench::{BenchArgs, PhaseArg, SizeArg};
pub use files::{ConvertArgs, NamesArg, PartArg, PlainArg, QuantizeArgs};
pub use hub::{ModelsArgs, PullArgs, RmArgs};
pub use machine::{MachineArgs, ThreadArgs};
#[cfg(feature = "serve")]
pub use serve::ServeArgs;

const ABOUT: &str = "Pictures from words (and pictures) with the FLUX.2 [klein] models";

const EXAMPLES: &str = "\
Examples:
  kiln generate \"a red apple on a blue background\"
  kiln generate \"a red fox in the snow\" -m models/klein-4b
  kiln generate \"make it night\" -m models/klein-4b -r house.jpg -o night.png
  kiln generate --from night.png -S 7
  kiln pull klein-4b
  kiln serve
  kiln quantize models/klein-4b models/klein-4b-int8 --to int8
  kiln info models/klein-4b
  kiln bench --peaks
  kiln doctor";

const GENERATE_EXAMPLES: &str = "\
Examples:
  kiln generate \"a red apple on a blue background\"                 (with Ember, the model inside)
  kiln generate \"a red fox in the snow\" -m models/klein-4b -W 768 -H 512 -S 42
  kiln generate \"a red fox in the snow\" -m flux-2-klein-4b-Q4_K_M.gguf --text-encoder qwen_3_4b.safetensors
  kiln generate \"the same chair, in green\" -m models/klein-4b -r chair.jpg -r swatch.png
  kiln generate \"a round window\" -m models/klein-4b --init wall.png --mask where.png
  kiln generate \"an owl\" -m models/klein-base -n \"blurry\" -g 4 --lora ink.safetensors:0.8
  kiln generate \"a fox\" \"a hen\" -m models/klein-4b -b 2 -o farm.png    (farm-1.png … farm-4.png)
  echo \"a red fox\" | kiln generate - -m models/klein-4b -o - > fox.png
  kiln generate --from fox.png -W 512                               (the same again, but wider)";

const BENCH_EXAMPLES: &str = "\
Examples:
  kiln bench                                         (klein 4B, 512x512, made-up weights of its size)
  kiln bench --synthetic 9b-kv --size 1024x1024 --refs 2 --dtype bf16
  kiln bench -m models/klein-4b --phase step --repeat 5 -v
  kiln bench --peaks                                 (what the machine could do at best)

Every phase runs once before its runs count. `share` is the part of a phase's time, `of peak` holds an operation's
rate against the machine's ceilings, `beyond weights` is the memory of the process beside the weights.";

const PULL_EXAMPLES: &str = "\
Names: klein-4b, klein-9b, klein-base-4b, klein-base-9b, klein-9b-kv; with -fp8, -nvfp4 or -gguf behind them where there
is such a repository; small-decoder; and any OWNER/REPO.

Models go into the cache that other programs use as well (HF_HOME, HF_HUB_CACHE). A download that was interrupted goes on
where it stopped. Gated models need the token of an account that has accepted their terms, in HF_TOKEN or from
`huggingface-cli login`. HF_ENDPOINT names another hub.

Examples:
  kiln pull klein-4b
  kiln generate \"a red fox in the snow\" -m klein-4b
  kiln pull klein-4b-gguf:Q4_K_M
  kiln pull someone/some-style:*.safetensors";

const CONVERT_EXAMPLES: &str = "\
Examples:
  kiln convert models/klein-4b klein-4b.safetensors                  (one file, as Black Forest Labs and ComfyUI have it)
  kiln convert flux-2-klein-4b.safetensors transformer               (a folder, as diffusers has it)
  kiln convert klein-4b-Q6_K.gguf klein-4b-bf16.safetensors --dtype bf16
  kiln convert models/klein-4b vae.safetensors --part vae --names diffusers";

#[cfg(feature = "serve")]
const SERVE_EXAMPLES: &str = "\
Examples:
  kiln serve                                         (a page at http://127.0.0.1:7860, painting with Ember)
  kiln serve -m models/klein-4b --preview-vae taef2.safetensors
  KILN_API_KEY=... kiln serve --host 0.0.0.0 --allow-host kiln.home

OpenAI's clients use http://127.0.0.1:7860/v1, those of A1111 http://127.0.0.1:7860; /openapi.json describes every call.
Pictures, their recipes and the queue are kept in the data folder. Ctrl-C lets the picture at work finish.";

const QUANTIZE_EXAMPLES: &str = "\
The linear layers inside the blocks become smaller, everything else is copied; how much each kind of layer lost is told.
With int8, `generate` computes with the integers (--dtype f32 or bf16 widens them; --dtype int8 does the same to any
model for a single run). What is packed otherwise stays packed in memory and is widened inside the products.

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

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate images; a prompt of `-` is read from standard input
    #[command(after_help = GENERATE_EXAMPLES, args_override_self = true)]
    Generate(Box<GenerateArgs>),
    /// Answer requests over HTTP, with a page to paint on
    #[cfg(feature = "serve")]
    #[command(after_help = SERVE_EXAMPLES, args_override_self = true)]
    Serve(Box<ServeArgs>),
    /// Fetch a model from Hugging Face
    #[command(after_help = PULL_EXAMPLES, args_override_self = true)]
    Pull(PullArgs),
    /// List the models that -m takes by name
    #[command(args_override_self = true)]
    Models(ModelsArgs),
    /// Remove a model that was fetched, or one of the models folder
    #[command(args_override_self = true)]
    Rm(RmArgs),
    /// Write a part of a model again: other names, another type, another kind of file
    #[command(after_help = CONVERT_EXAMPLES, args_override_self = true)]
    Convert(ConvertArgs),
    /// Write a model again with its transformer in fewer bits
    #[command(after_help = QUANTIZE_EXAMPLES, args_override_self = true)]
    Quantize(QuantizeArgs),
    /// Describe a model, a weight file, or an image and how it was made
    #[command(args_override_self = true)]
    Info(InfoArgs),
    /// Say what this machine offers
    #[command(args_override_self = true)]
    Doctor(DoctorArgs),
    /// Measure how fast this machine runs a model, with or without its weights
    #[command(after_help = BENCH_EXAMPLES, args_override_self = true)]
    Bench(Box<BenchArgs>),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
}

#[derive(Debug, Default, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub request: Request,

    /// Make an image that Kiln made again; options beside it change what they name
    #[arg(long, value_name = "IMAGE")]
    pub from: Option<PathBuf>,

    #[command(flatten)]
    pub parts: PartArgs,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Don't keep encoded texts on disk, and use none that are there (see `kiln doctor`)
    #[arg(long, help_heading = "Machine")]
    pub no_cache: bool,

    /// Where the picture goes: .png, .jpg or .webp, `-` is standard output [default: a name from prompt and seed]
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// Write the final packed latents, too: safetensors with `latents`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub latents_out: Option<PathBuf>,

    /// Leave out of the picture how it was made (prompt, seed, paths, …)
    #[arg(long, help_heading = "Output")]
    pub no_recipe: bool,

    /// Show the picture in the terminal; =kitty, =iterm2, =sixel or =blocks says how
    #[arg(
        long, value_name = "HOW", help_heading = "Output", num_args = 0..=1, require_equals = true,
        default_missing_value = "auto"
    )]
    pub preview: Option<PreviewArg>,

    /// Tell what happens as JSON on standard output, an event a line
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Say nothing but errors
    #[arg(short, long, help_heading = "Output", conflicts_with = "verbose")]
    pub quiet: bool,

    /// Say more
    #[arg(short, long, help_heading = "Output", action = ArgAction::SetTrue)]
    pub verbose: bool,
}

/// Parts of a model that are not its own.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct PartArgs {
    /// Transformer to use instead of the model's, or as the model
    #[arg(long, value_name = "PATH")]
    pub transformer: Option<PathBuf>,

    /// Text encoder to use instead of the model's
    #[arg(long, value_name = "PATH")]
    pub text_encoder: Option<PathBuf>,

    /// Tokenizer to use instead of the model's: tokenizer.json, or a folder with it
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,

    /// What kind of model it is, where neither model_index.json nor its name says so
    #[arg(long, value_name = "KIND")]
    pub variant: Option<Variant>,
}

impl PartArgs {
    pub fn parts(&self) -> Parts {
        Parts {
            transformer: self.transformer.clone(),
            text_encoder: self.text_encoder.clone(),
            vae: None,
            tokenizer: self.tokenizer.clone(),
            variant: self.variant,
            others: Vec::new(),
        }
    }
}

#[derive(Debug, Args)]
pub struct InfoArgs {
    /// The folder or file, or the name of a model
    pub path: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// How a picture is shown in the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PreviewArg {
    Auto,
    Kitty,
    Iterm2,
    Sixel,
    Blocks,
}

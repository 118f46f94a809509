//! The command line, as clap reads it. What the words mean together is decided in [`crate::order`].

mod bench;
mod files;
mod hub;
mod machine;
#[cfg(feature = "serve")]
mod serve;

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use serde::{Deserialize, Serialize};

use crate::values::LoraArg;
pub use bench::{BenchArgs, GraphsArg, PhaseArg, SizeArg};
pub use files::{ConvertArgs, NamesArg, PartArg, PlainArg, QuantizeArgs};
pub use hub::{ModelsArgs, PullArgs, RmArgs};
pub use machine::{DTypeArg, IsaArg, MachineArgs, ThreadArgs};
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

/// A latent token stands for so many pixels each way: no picture is smaller.
const MIN_SIDE: usize = 16;

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
    /// Make pictures
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
    /// Describe a model, a weight file, or a picture and how it was made
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
    /// What to paint; `-` reads it from standard input. Several make a picture each
    #[arg(value_name = "PROMPT")]
    pub prompts: Vec<String>,

    /// Make a picture that Kiln made again; options beside it change what they name
    #[arg(long, value_name = "PICTURE")]
    pub from: Option<PathBuf>,

    /// The model: a folder in diffusers' layout or the Hugging Face cache's, a file (safetensors or GGUF, the other parts
    /// beside it), a model.toml, or a name: `ember` or one in the models folder (see `kiln doctor`) [default: the recipe's, else
    /// $KILN_MODEL, else ember]
    #[arg(short, long, value_name = "MODEL", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Transformer to use instead of the model's, or as the model
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    pub transformer: Option<PathBuf>,

    /// Text encoder to use instead of the model's
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    pub text_encoder: Option<PathBuf>,

    /// Tokenizer to use instead of the model's: tokenizer.json, or a folder with it
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    pub tokenizer: Option<PathBuf>,

    /// What kind of model it is, where neither model_index.json nor its name says so
    #[arg(long, value_name = "KIND", help_heading = "Model")]
    pub variant: Option<VariantArg>,

    /// LoRA for the transformer, of any trainer's layout, with its weight (1 when absent, may be negative); repeatable
    #[arg(long = "lora", value_name = "FILE[:WEIGHT]", help_heading = "Model", value_parser = LoraArg::parse)]
    pub loras: Vec<LoraArg>,

    /// Use what fits of a --lora, and say what doesn't, where it would be refused
    #[arg(long, help_heading = "Model")]
    pub lora_partial: bool,

    /// Autoencoder to use instead of the model's: TAEF2, or another FLUX.2 VAE
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// Width in pixels, rounded down to a multiple of 16 [default: the first reference's, else the model's own: 1024, Ember's 256]
    #[arg(
        short = 'W', long, value_name = "N", help_heading = "Picture", allow_negative_numbers = true,
        value_parser = at_least::<MIN_SIDE>()
    )]
    pub width: Option<usize>,

    /// Height in pixels, likewise
    #[arg(
        short = 'H', long, value_name = "N", help_heading = "Picture", allow_negative_numbers = true,
        value_parser = at_least::<MIN_SIDE>()
    )]
    pub height: Option<usize>,

    /// Pictures for each prompt
    #[arg(
        short, long, value_name = "N", help_heading = "Picture", allow_negative_numbers = true,
        value_parser = at_least::<1>()
    )]
    pub batch: Option<usize>,

    /// Seed up to 2⁶⁴−1, random when absent; a list (`11,12`) gives each picture a generator of its own
    #[arg(
        short = 'S', long, value_name = "N", value_delimiter = ',', help_heading = "Picture", action = ArgAction::Set,
        allow_negative_numbers = true, value_parser = seed
    )]
    pub seed: Vec<u64>,

    /// What to stay away from, on models with guidance
    #[arg(short, long, value_name = "TEXT", help_heading = "Picture", allow_hyphen_values = true)]
    pub negative: Option<String>,

    /// Prompt embeddings made elsewhere instead of a prompt: safetensors with `prompt_embeds`
    #[arg(long, value_name = "FILE", help_heading = "Picture", conflicts_with = "prompts")]
    pub embeds: Option<PathBuf>,

    /// Tokens that the prompt is cut or padded to [default: the model's own: 512, Ember's 64]
    #[arg(
        long, value_name = "N", help_heading = "Picture", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=32768)
    )]
    pub max_tokens: Option<u32>,

    /// Picture to look at while painting; repeatable
    #[arg(short = 'r', long = "ref", value_name = "FILE", help_heading = "Pictures to work from")]
    pub references: Vec<PathBuf>,

    /// Picture to start from
    #[arg(long, value_name = "FILE", help_heading = "Pictures to work from")]
    pub init: Option<PathBuf>,

    /// Where to repaint --init: white is painted, black stays
    #[arg(long, value_name = "FILE", help_heading = "Pictures to work from")]
    pub mask: Option<PathBuf>,

    /// How far to leave --init, from 0 (not at all) to 1 (forget it) [default: 0.6, with --mask 0.8]
    #[arg(long, value_name = "F", help_heading = "Pictures to work from", allow_negative_numbers = true)]
    pub strength: Option<f64>,

    /// Work only on the mask's surroundings, so many pixels around it
    #[arg(
        long, value_name = "N", help_heading = "Pictures to work from", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(0..)
    )]
    pub mask_padding: Option<u32>,

    /// Steps [default: the model's own, else 4 or 50]
    #[arg(
        short, long, value_name = "N", help_heading = "Sampling", allow_negative_numbers = true,
        value_parser = at_least::<1>()
    )]
    pub steps: Option<usize>,

    /// Guidance, on models that have it [default: the model's own, else 4]
    #[arg(short, long, value_name = "F", help_heading = "Sampling", allow_negative_numbers = true)]
    pub guidance: Option<f32>,

    /// Noise levels before shifting, falling from 1
    #[arg(
        long, value_name = "A,B,C", value_delimiter = ',', help_heading = "Sampling", action = ArgAction::Set,
        allow_negative_numbers = true
    )]
    pub sigmas: Vec<f32>,

    /// How the noise levels are spread: as trained, or linspace(1,0,n+1)^(1/rho) [default: shifted]
    #[arg(long, value_name = "KIND", help_heading = "Sampling")]
    pub schedule: Option<ScheduleArg>,

    /// Exponent of --schedule power: 1 is even, more stays longer at high noise [default: 2]
    #[arg(long, value_name = "F", help_heading = "Sampling", allow_negative_numbers = true)]
    pub rho: Option<f32>,

    /// Which of torch's generators a seed is for; 16-bit draws on the CPU changed with torch 2.12 [default: cpu]
    #[arg(long, value_name = "KIND", help_heading = "Sampling")]
    pub rng: Option<RngArg>,

    /// Noise to start from instead of a seed: safetensors with `noise` or `latents`
    #[arg(long, value_name = "FILE", help_heading = "Sampling", conflicts_with = "seed")]
    pub noise: Option<PathBuf>,

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

/// The kinds of FLUX.2 that tensors don't tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VariantArg {
    /// Four steps, no guidance
    Distilled,
    /// Many steps, guidance
    Base,
    /// Distilled, references computed once
    Kv,
    /// dev: guidance is an input
    Dev,
}

impl From<VariantArg> for kiln_model::Variant {
    fn from(arg: VariantArg) -> Self {
        match arg {
            VariantArg::Distilled => kiln_model::Variant::Distilled,
            VariantArg::Base => kiln_model::Variant::Base,
            VariantArg::Kv => kiln_model::Variant::Kv,
            VariantArg::Dev => kiln_model::Variant::Dev,
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleArg {
    #[default]
    Shifted,
    Power,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RngArg {
    /// CPU generator: every f32 pipeline, and 16-bit ones from torch 2.13 on
    #[default]
    Cpu,
    /// CPU generator of a bf16 pipeline up to torch 2.11
    CpuBf16,
    /// CPU generator of an f16 pipeline up to torch 2.11
    CpuF16,
    /// CUDA generator, any torch
    Cuda,
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

/// A whole number that is not too small, and a message that says so of negative numbers, too.
fn at_least<const MIN: usize>() -> clap::builder::ValueParser {
    clap::builder::ValueParser::new(|text: &str| {
        let number = text.parse::<usize>().ok().filter(|n| *n >= MIN);
        number.ok_or_else(|| format!("expected a whole number of at least {MIN}"))
    })
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

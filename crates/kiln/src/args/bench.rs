//! Arguments of `kiln bench`.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};

use kiln_engine::{CudaGraphs, LoraRef};
use kiln_family::default_family;

use super::MachineArgs;
use super::serve::BenchServerArgs;

#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Model to measure: a folder, a file or a name
    #[arg(short, long, value_name = "MODEL", conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,

    /// Use synthetic weights of this model's size instead [default: 4b]
    #[arg(long, value_name = "SIZE")]
    pub synthetic: Option<SizeArg>,

    /// Store the linear layers of synthetic weights as bf16, or in 4 bits as in a GGUF file
    #[arg(long, value_name = "TYPE", default_value = "bf16", conflicts_with = "model")]
    pub stored: StoredArg,

    /// LoRA for the transformer, with its weight; repeatable
    #[arg(long = "lora", value_name = "FILE[:WEIGHT]", value_parser = LoraRef::parse)]
    pub loras: Vec<LoraRef>,

    /// Image size [default: 512x512]
    #[arg(long, value_name = "WxH", value_parser = parse_size)]
    pub size: Option<(usize, usize)>,

    /// Number of reference images, of the same size
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub refs: u32,

    /// Batch size: images that go through each step together, as in `kiln serve`
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub batch: u32,

    /// Number of text tokens [default: the model's, 512 for FLUX.2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32768))]
    pub max_tokens: Option<u32>,

    /// Measure only this phase; repeatable [default: all but `image` and `token`]
    #[arg(long = "phase", value_name = "PHASE")]
    pub phases: Vec<PhaseArg>,

    /// Measured runs, after one warm-up run [default: 3]
    #[arg(long, visible_alias = "steps", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: Option<u32>,

    /// When to replay steps as CUDA graphs
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub graphs: CudaGraphs,

    /// Measure only the machine's peaks: matrix products of each type, memory reads and copies
    #[arg(long)]
    pub peaks: bool,

    #[command(flatten)]
    pub server: BenchServerArgs,

    /// Measure steps of training a LoRA of rank 16 on all layers
    #[arg(long, conflicts_with_all = ["phases", "peaks", "loras"])]
    pub train: bool,

    /// Compute activations of a training step twice instead of keeping them
    #[arg(long, requires = "train")]
    pub checkpointing: bool,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Check and measure this machine, its GPU and its CPU, and write a report to send in
    #[arg(
        long, value_name = "FILE", help_heading = "Output",
        conflicts_with_all = ["phases", "peaks", "loras", "train"]
    )]
    pub report: Option<PathBuf>,

    /// Print the result as JSON (described in bench/README.md)
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// List operations by size
    #[arg(short, long, help_heading = "Output", action = ArgAction::SetTrue)]
    pub verbose: bool,
}

/// The size of a published model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SizeArg {
    #[value(name = "4b")]
    Klein4b,
    #[value(name = "9b")]
    Klein9b,
    #[value(name = "9b-kv")]
    Klein9bKv,
    Dev,
    /// The random model of Kiln's tests
    Tiny,
}

/// How synthetic weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoredArg {
    Bf16,
    #[value(name = "q4_k")]
    Q4K,
}

/// A phase of image generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PhaseArg {
    /// Text encoder
    Text,
    /// VAE encode of the reference images
    Encode,
    /// One token of a rewritten prompt, by the text encoder with its output head; measured only if named
    Token,
    /// One step of the transformer
    Step,
    /// VAE decode
    Decode,
    /// A whole image in four steps through the engine, with everything loaded; measured only if named
    #[value(alias = "picture")]
    Image,
}

/// Parses `512x384`.
fn parse_size(text: &str) -> Result<(usize, usize), String> {
    let unit = default_family().latent.pixels_per_token();
    let invalid = || format!("expected WIDTHxHEIGHT in pixels, multiples of {unit}, such as 1024x768");
    let (width, height) = text.split_once(['x', '×']).ok_or_else(invalid)?;
    let side =
        |text: &str| text.parse::<usize>().ok().filter(|n| *n >= unit && n % unit == 0 && *n <= 16_384);
    Ok((side(width).ok_or_else(invalid)?, side(height).ok_or_else(invalid)?))
}

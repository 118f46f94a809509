//! What `kiln bench` is told.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};

use kiln_engine::{Graphs, LoraRef};

use super::MachineArgs;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Model to measure: its folder, its file or its name
    #[arg(short, long, value_name = "MODEL", conflicts_with = "synthetic")]
    pub model: Option<PathBuf>,

    /// Make up weights of this model's size in memory instead [default: 4b]
    #[arg(long, value_name = "SIZE")]
    pub synthetic: Option<SizeArg>,

    /// LoRA over the transformer, with its weight; repeatable
    #[arg(long = "lora", value_name = "FILE[:WEIGHT]", value_parser = LoraRef::parse)]
    pub loras: Vec<LoraRef>,

    /// Size of the image [default: 512x512]
    #[arg(long, value_name = "WxH", value_parser = crate::bench::parse_size)]
    pub size: Option<(usize, usize)>,

    /// Reference images, of the same size
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub refs: u32,

    /// Images that take a step at once, as `kiln serve` makes those of requests that are alike
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub batch: u32,

    /// Text tokens [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32768))]
    pub max_tokens: Option<u32>,

    /// Measure only this; repeatable [default: all]
    #[arg(long = "phase", value_name = "PHASE")]
    pub phases: Vec<PhaseArg>,

    /// Runs that count, after one that doesn't [default: 3]
    #[arg(long, visible_alias = "steps", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: Option<u32>,

    /// Replay steps as CUDA graphs: where launching limits them, wherever they can be, or nowhere
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub graphs: Graphs,

    /// Measure the machine's ceilings only: products of each kind, reading and copying memory
    #[arg(long)]
    pub peaks: bool,

    /// Measure images through a server on this machine: one after the other, and many at once
    #[cfg(feature = "serve")]
    #[arg(long, conflicts_with_all = ["phases", "peaks", "loras", "refs", "batch"])]
    pub server: bool,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// As JSON on standard output (described in bench/README.md)
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Keep operations on different sizes apart
    #[arg(short, long, help_heading = "Output", action = ArgAction::SetTrue)]
    pub verbose: bool,
}

/// A published model's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SizeArg {
    #[value(name = "4b")]
    Klein4b,
    #[value(name = "9b")]
    Klein9b,
    #[value(name = "9b-kv")]
    Klein9bKv,
    Dev,
    /// The random model that Kiln is tested with
    Tiny,
}

/// A part of the way to a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PhaseArg {
    /// Text to tokens
    Text,
    /// References to tokens
    Encode,
    /// One step of the transformer
    Step,
    /// Tokens to image
    Decode,
    /// Text to image in four steps through the engine, with everything loaded; only when it is asked for
    Picture,
}

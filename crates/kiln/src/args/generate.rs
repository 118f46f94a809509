//! Arguments of `kiln generate`.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use kiln_engine::Request;

use super::size::{Aspect, parse_size};
use super::{CheckArgs, ComponentArgs, MachineArgs, SignArgs, UpsampleArgs, WatermarkArgs};

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
        value_parser = parse_size
    )]
    pub size: Option<(u32, u32)>,

    /// Aspect ratio such as 16:9, with about as many pixels as the default size, or for the given -W or -H
    #[arg(
        long, alias = "aspect-ratio", value_name = "W:H", help_heading = "Image", conflicts_with = "size",
        value_parser = Aspect::parse
    )]
    pub aspect: Option<Aspect>,

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

    /// Don't mark the image as made by AI (IPTC's properties as XMP); laws may ask for the mark
    #[arg(long, help_heading = "Output")]
    pub no_ai_mark: bool,

    #[command(flatten)]
    pub watermark: WatermarkArgs,

    #[command(flatten)]
    pub sign: SignArgs,

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

/// A protocol for showing images in the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PreviewArg {
    Auto,
    Kitty,
    Iterm2,
    Sixel,
    Blocks,
}

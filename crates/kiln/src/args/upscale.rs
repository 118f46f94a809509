//! Arguments of `kiln upscale`.

use std::path::PathBuf;

use clap::Args;
use kiln_engine::{LoraRef, Request};

use super::{CheckArgs, ComponentArgs, GenerateArgs, MachineArgs, PreviewArg, SignArgs, WatermarkArgs};

#[derive(Debug, Args)]
pub struct UpscaleArgs {
    /// The image
    pub image: PathBuf,

    /// Factor: 2 or 4
    #[arg(short = 'x', long, value_name = "N", default_value = "2", value_parser = ["2", "4"])]
    pub scale: String,

    /// What the image shows [default: the prompt of its recipe]
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,

    /// How much to change: from just above 0 (sharper) to 1 (a new image)
    #[arg(long, value_name = "F", default_value_t = 0.35, allow_negative_numbers = true)]
    pub strength: f64,

    /// Number of denoising steps for each tile [default: the model's, times the strength]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: Option<u32>,

    /// Step cache for models with many steps; as for `kiln generate`
    #[arg(long, value_name = "THRESHOLD", num_args = 0..=1, default_missing_value = "0.1", value_parser = kiln_engine::cache_threshold)]
    pub cache: Option<f32>,

    /// Seed [default: random]
    #[arg(short = 'S', long, value_name = "N")]
    pub seed: Option<u64>,

    /// Longest side of the tiles in pixels [default: the model's size: 1024, Ember 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(64..))]
    pub tile_size: Option<u32>,

    /// Model, as for `kiln generate` [default: the recipe's, else as there]
    #[arg(short, long, value_name = "MODEL", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// LoRA for the transformer, with its weight; repeatable
    #[arg(long = "lora", value_name = "FILE[:WEIGHT]", help_heading = "Model", value_parser = LoraRef::parse)]
    pub loras: Vec<LoraRef>,

    /// VAE to use instead of the model's
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    #[command(flatten)]
    pub components: ComponentArgs,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Download a model that is not there without asking
    #[arg(short, long, help_heading = "Model")]
    pub yes: bool,

    /// Output, as for `kiln generate` [default: the image's name with -2x or -4x]
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// JPEG and WebP quality, from 0 to 100
    #[arg(
        long, value_name = "N", help_heading = "Output", value_parser = clap::value_parser!(u8).range(0..=100)
    )]
    pub quality: Option<u8>,

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

    /// Show the image in the terminal, after each tile; as for `kiln generate`
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
    #[arg(short, long, help_heading = "Output")]
    pub verbose: bool,
}

impl UpscaleArgs {
    /// Returns the same as arguments of `kiln generate`, which writes to `output`.
    pub fn into_generate(self, output: PathBuf) -> GenerateArgs {
        GenerateArgs {
            request: Request {
                prompts: self.prompt.into_iter().collect(),
                init: Some(self.image.into()),
                upscale: self.scale.parse().ok(),
                strength: Some(self.strength),
                steps: self.steps,
                cache: self.cache,
                seed: self.seed.into_iter().collect(),
                tile_size: self.tile_size,
                model: self.model,
                loras: self.loras,
                vae: self.vae.map(Into::into),
                output_compression: self.quality,
                ..Request::default()
            },
            components: self.components,
            machine: self.machine,
            yes: self.yes,
            output: Some(output),
            no_recipe: self.no_recipe,
            no_ai_mark: self.no_ai_mark,
            watermark: self.watermark,
            sign: self.sign,
            check: self.check,
            preview: self.preview,
            json: self.json,
            quiet: self.quiet,
            verbose: self.verbose,
            ..GenerateArgs::default()
        }
    }
}

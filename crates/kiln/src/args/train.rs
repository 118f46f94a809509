//! Options of `kiln train`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ComponentArgs, MachineArgs};

#[derive(Debug, Default, Args)]
pub struct TrainArgs {
    /// Folder of pictures with captions (.txt) beside them, a .jsonl or a .csv file; for edits, a folder with before/ and
    /// after/
    pub data: PathBuf,

    /// Base model to train on: a folder, a file or a name, such as klein-base-4b; the default is the built-in ember-base
    #[arg(short, long, value_name = "MODEL", help_heading = "Model")]
    pub model: Option<PathBuf>,

    #[command(flatten)]
    pub components: ComponentArgs,

    /// Train on a distilled model, which usually spoils it
    #[arg(long, help_heading = "Model")]
    pub distilled_anyway: bool,

    /// LoRA to write, a .safetensors file; state, log and samples go to the folder NAME.train beside it
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: PathBuf,

    #[command(flatten)]
    pub pictures: PictureArgs,

    #[command(flatten)]
    pub steps: StepArgs,

    #[command(flatten)]
    pub adapter: AdapterArgs,

    #[command(flatten)]
    pub saving: SavingArgs,

    #[command(flatten)]
    pub samples: SampleArgs,

    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Pictures")]
pub struct PictureArgs {
    /// Word or phrase that stands for what is learned: takes the place of `[trigger]` in captions, else goes in front
    #[arg(long, value_name = "TEXT")]
    pub trigger: Option<String>,

    /// Sizes in pixels, as the side of a square; pictures keep their shape, and are used at each size that they have
    /// [default: 768, or the size of a smaller model]
    #[arg(long, value_name = "SIDE", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(64..=2048))]
    pub resolution: Vec<u32>,

    /// How often each picture counts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub repeats: u32,

    /// Share of the examples that are learned without their caption, which guidance needs
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, value_parser = share)]
    pub caption_dropout: f32,

    /// Share of the edits that are learned without their references
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub reference_dropout: f32,

    /// Mirror half of the examples; not for faces, text or anything with a left and a right
    #[arg(long)]
    pub flip: bool,

    /// Train on pictures without captions
    #[arg(long)]
    pub no_captions: bool,

    /// Leave out broken and tiny pictures instead of stopping
    #[arg(long)]
    pub skip_bad: bool,

    /// Folder for encoded pictures and captions [default: train in the cache folder, see `kiln doctor`]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,

    /// Check the pictures, estimate the cost, and stop
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Training")]
pub struct StepArgs {
    /// Optimizer steps
    #[arg(short, long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub steps: u64,

    /// Examples of a batch
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub batch: u32,

    /// Batches whose gradients are averaged for a step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub accumulate: u32,

    /// Learning rate [default: 1e-4; 1 with prodigy, which finds its own]
    #[arg(long, value_name = "RATE", value_parser = positive)]
    pub lr: Option<f32>,

    /// Steps over which the learning rate rises
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warmup: u64,

    /// Learning rate after the warm-up
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    pub schedule: ScheduleArg,

    /// Optimizer
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub optimizer: OptimizerArg,

    /// Weight decay
    #[arg(long, value_name = "RATE", default_value_t = 0.01, value_parser = not_negative)]
    pub weight_decay: f32,

    /// Largest norm of the gradient; 0 does not clip
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = not_negative)]
    pub clip: f32,

    /// Write the moving average of the adapter, with this decay, such as 0.99
    #[arg(long, value_name = "DECAY", value_parser = share)]
    pub ema: Option<f32>,

    /// Noise levels: logit-normal (shifted as FLUX was trained), uniform, or a list such as 0.3,0.6,0.9
    #[arg(long, value_name = "LEVELS", default_value = "logit-normal", value_parser = SigmaArg::parse)]
    pub sigmas: SigmaArg,

    /// Seed of the adapter's start, the order of pictures and the noise
    #[arg(short = 'S', long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Compute activations twice instead of keeping them: a third slower, much less memory
    #[arg(long, value_name = "WHEN", value_enum, default_value_t)]
    pub checkpointing: CheckpointingArg,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Adapter")]
pub struct AdapterArgs {
    /// Kind of adapter
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    pub kind: KindArg,

    /// Rank
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub rank: u32,

    /// Alpha: the update is scaled by alpha / rank [default: the rank]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub alpha: Option<f32>,

    /// Share of a LoRA's inputs that are dropped in a step
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub dropout: f32,

    /// Layers: full (all of the blocks), style (double blocks), identity (single blocks 0 to 12), or names such as
    /// attn.to_q and transformer_blocks.*.ff.*, separated by commas
    #[arg(long, value_name = "LAYERS", value_delimiter = ',', default_value = "full")]
    pub targets: Vec<String>,

    /// Ranks of double blocks' attention, their MLPs, single blocks' input and output, such as 128,64,64,32
    #[arg(long, value_name = "A,B,C,D", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: Vec<u32>,

    /// LoKr: size of the first factor [default: split evenly]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub factor: Option<u32>,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct SavingArgs {
    /// Names of the LoRA's keys
    #[arg(long, value_name = "NAMES", value_enum, default_value_t)]
    pub layout: LayoutArg,

    /// Data type of the LoRA
    #[arg(long, value_name = "TYPE", value_enum, default_value_t)]
    pub save_dtype: SaveTypeArg,

    /// Steps between checkpoints
    #[arg(long, value_name = "N", default_value_t = 250, value_parser = clap::value_parser!(u64).range(1..))]
    pub save_every: u64,

    /// Continue from the last checkpoint, as if it had never stopped; --steps, --lr, --warmup, --schedule, --clip and --dtype
    /// may be others
    #[arg(long, conflicts_with = "overwrite")]
    pub resume: bool,

    /// Replace an existing LoRA and its training
    #[arg(long)]
    pub overwrite: bool,

    /// Write files for TensorBoard, too
    #[arg(long)]
    pub tensorboard: bool,

    /// Print only errors
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Samples")]
pub struct SampleArgs {
    /// Steps between sample images
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub sample_every: Option<u64>,

    /// Prompt of a sample; several by repeating the option [default: the first captions]
    #[arg(long = "sample-prompt", value_name = "PROMPT")]
    pub sample_prompts: Vec<String>,

    /// Model to generate samples with, such as klein-4b: a distilled one is faster and closer to how the LoRA will be used
    /// [default: the distilled model of the same name if it is at hand, else the base model]
    #[arg(long, value_name = "MODEL")]
    pub sample_model: Option<PathBuf>,

    /// Steps of a sample [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub sample_steps: Option<u32>,

    /// Seed of the samples
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub sample_seed: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ScheduleArg {
    /// Stays
    #[default]
    Constant,
    /// Falls to zero at the last step
    Cosine,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OptimizerArg {
    /// AdamW with 32-bit state
    #[default]
    Adamw,
    /// AdamW with 8-bit state: a quarter of its memory
    Adamw8bit,
    /// Prodigy, which finds the learning rate itself
    Prodigy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CheckpointingArg {
    /// If memory would be too small
    #[default]
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KindArg {
    /// Two low-rank matrices for each layer
    #[default]
    Lora,
    /// A Kronecker product: smaller files
    Lokr,
    /// LoRA with a learned magnitude for each output
    Dora,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    /// transformer.*, with PEFT's settings: Kiln, diffusers, ComfyUI
    #[default]
    Diffusers,
    /// diffusion_model.* with Black Forest Labs' names: ai-toolkit, ComfyUI
    Comfyui,
    /// lora_unet_*: kohya's scripts, musubi
    Kohya,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SaveTypeArg {
    /// 16 bits
    #[default]
    Bf16,
    /// 32 bits
    F32,
}

/// The noise levels of a training.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum SigmaArg {
    #[default]
    LogitNormal,
    Uniform,
    List(Vec<f32>),
}

impl SigmaArg {
    fn parse(text: &str) -> Result<SigmaArg, String> {
        let level =
            |text: &str| text.trim().parse::<f32>().ok().filter(|level| *level > 0.0 && *level <= 1.0);
        match text {
            "logit-normal" => Ok(SigmaArg::LogitNormal),
            "uniform" => Ok(SigmaArg::Uniform),
            list => list.split(',').map(level).collect::<Option<_>>().map(SigmaArg::List).ok_or_else(|| {
                "expected logit-normal, uniform, or levels above 0 and at most 1 such as 0.3,0.6".into()
            }),
        }
    }
}

fn share(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|number| (0.0..1.0).contains(number));
    number.ok_or_else(|| "expected a number from 0, below 1".into())
}

fn positive(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|number| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| "expected a number above 0".into())
}

fn not_negative(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|number| *number >= 0.0 && number.is_finite());
    number.ok_or_else(|| "expected a number, 0 or more".into())
}

//! The request of a training: what to learn, and how. The command line, the HTTP API and Python translate into it.
//!
//! A request is plain data, as that of an image: files and models are named, not read. What it leaves out comes from its
//! preset, else from the defaults in the fields' comments.

mod checks;
mod choices;
mod preset;
mod settings;
mod wire;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::AdapterKind;
pub use choices::{
    Checkpointing, LearningSchedule, LoraLayout, OptimizerName, Preset, SaveDtype, SigmaLevels,
};

/// What to learn, and how. Over HTTP, models are given by name and images are sent along; fields about files of the
/// machine are not accepted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TrainRequest {
    /// Folder of images with captions (.txt) beside them, a .jsonl or a .csv file; for edits, a folder with before/ and
    /// after/
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    #[serde(skip_serializing_if = "is_empty")]
    pub data: PathBuf,

    /// Base model to train on: a folder, a file or a name, such as klein-base-4b; the default is the built-in ember-base
    #[cfg_attr(feature = "cli", arg(short, long, value_name = "MODEL", help_heading = "Model"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<PathBuf>,

    /// Train on a distilled model, which usually spoils it
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Model"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub distilled_anyway: bool,

    /// LoRA to write, a .safetensors file; state, log and samples go to the folder NAME.train beside it. Over HTTP, its
    /// name: letters, digits, spaces, `.`, `-` and `_`; if it is taken, a number is added
    #[cfg_attr(feature = "cli", arg(short, long, value_name = "FILE", help_heading = "Output"))]
    #[cfg_attr(feature = "schema", schema(value_type = String, required = true))]
    #[serde(rename = "name", alias = "output", skip_serializing_if = "is_empty")]
    pub output: PathBuf,

    /// What to learn: chooses steps, rank, layers, sizes and the learning rate for the model, where they are not given
    #[cfg_attr(feature = "cli", arg(long, value_name = "WHAT", help_heading = "Training"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,

    /// Word or phrase that stands for what is learned: takes the place of `[trigger]` in captions, else goes in front
    #[cfg_attr(feature = "cli", arg(long, value_name = "TEXT", help_heading = "Images"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trigger: Option<String>,

    /// Sizes in pixels, as the side of a square; images keep their shape, and are used at each size that they have
    /// [default: 768, or the size of a smaller model]
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "SIDE", value_delimiter = ',', help_heading = "Images")
    )]
    #[cfg_attr(feature = "schema", schema(value_type = kiln_engine::OneOrMany<u32>))]
    #[serde(deserialize_with = "wire::one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub resolution: Vec<u32>,

    /// How often each image counts [default: 1]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Images"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 10000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repeats: Option<u32>,

    /// Share of the examples that are learned without their caption, which guidance needs [default: 0.05]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SHARE", help_heading = "Images"))]
    #[cfg_attr(feature = "schema", schema(minimum = 0, exclusive_maximum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caption_dropout: Option<f32>,

    /// Share of the edits that are learned without their references [default: 0]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SHARE", help_heading = "Images"))]
    #[cfg_attr(feature = "schema", schema(minimum = 0, exclusive_maximum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_dropout: Option<f32>,

    /// Mirror half of the examples; not for faces, text or anything with a left and a right
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Images"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub flip: bool,

    /// Train on images without captions
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Images"))]
    #[serde(alias = "allow_empty_captions", skip_serializing_if = "std::ops::Not::not")]
    pub no_captions: bool,

    /// Leave out broken and tiny images instead of stopping
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Images"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skip_bad: bool,

    /// Folder for encoded images and captions [default: train in the cache folder, see `kiln doctor`]
    #[cfg_attr(feature = "cli", arg(long, value_name = "DIR", help_heading = "Images"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_dir: Option<PathBuf>,

    /// Optimizer steps [default: 1000]
    #[cfg_attr(feature = "cli", arg(short, long, value_name = "N", help_heading = "Training"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 10000000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,

    /// Examples of a batch [default: 1]
    #[cfg_attr(feature = "cli", arg(short, long, value_name = "N", help_heading = "Training"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<u32>,

    /// Batches whose gradients are averaged for a step [default: 1]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Training"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulate: Option<u32>,

    /// Learning rate [default: 1e-4; 1 with prodigy, which finds its own]
    #[cfg_attr(
        feature = "cli",
        arg(long = "lr", alias = "learning-rate", value_name = "RATE", help_heading = "Training")
    )]
    #[cfg_attr(feature = "schema", schema(exclusive_minimum = 0))]
    #[serde(alias = "lr", skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f32>,

    /// Steps over which the learning rate rises [default: 0]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Training"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup: Option<u64>,

    /// Learning rate after the warm-up [default: constant]
    #[cfg_attr(feature = "cli", arg(long, value_name = "KIND", help_heading = "Training"))]
    #[serde(alias = "cosine", deserialize_with = "wire::schedule", skip_serializing_if = "Option::is_none")]
    pub schedule: Option<LearningSchedule>,

    /// Optimizer [default: adamw]
    #[cfg_attr(feature = "cli", arg(long, value_name = "NAME", help_heading = "Training"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerName>,

    /// Weight decay [default: 0.01]
    #[cfg_attr(feature = "cli", arg(long, value_name = "RATE", help_heading = "Training"))]
    #[cfg_attr(feature = "schema", schema(minimum = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,

    /// Largest norm of the gradient; 0 does not clip [default: 1]
    #[cfg_attr(feature = "cli", arg(long, value_name = "NORM", help_heading = "Training"))]
    #[cfg_attr(feature = "schema", schema(minimum = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip: Option<f32>,

    /// Write the moving average of the adapter, with this decay, such as 0.99
    #[cfg_attr(feature = "cli", arg(long, value_name = "DECAY", help_heading = "Training"))]
    #[cfg_attr(feature = "schema", schema(minimum = 0, exclusive_maximum = 1))]
    #[serde(alias = "ema_decay", skip_serializing_if = "Option::is_none")]
    pub ema: Option<f32>,

    /// Noise levels: logit-normal (shifted as FLUX was trained), uniform, or a list such as 0.3,0.6,0.9
    /// [default: logit-normal]
    #[cfg_attr(feature = "cli", arg(long, value_name = "LEVELS", help_heading = "Training"))]
    #[serde(deserialize_with = "wire::sigmas", skip_serializing_if = "Option::is_none")]
    pub sigmas: Option<SigmaLevels>,

    /// Seed of the adapter's start, the order of images and the noise [default: 0]
    #[cfg_attr(feature = "cli", arg(short = 'S', long, value_name = "N", help_heading = "Training"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,

    /// Compute activations twice instead of keeping them: a third slower, much less memory [default: auto]
    #[cfg_attr(feature = "cli", arg(long, value_name = "WHEN", help_heading = "Training"))]
    #[serde(deserialize_with = "wire::checkpointing", skip_serializing_if = "Option::is_none")]
    pub checkpointing: Option<Checkpointing>,

    /// Kind of adapter [default: lora]
    #[cfg_attr(feature = "cli", arg(long, value_name = "KIND", help_heading = "Adapter"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<AdapterKind>,

    /// Rank [default: 16]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Adapter"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,

    /// Alpha: the update is scaled by alpha / rank [default: the rank]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Adapter"))]
    #[cfg_attr(feature = "schema", schema(exclusive_minimum = 0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f32>,

    /// Share of a LoRA's inputs that are dropped in a step [default: 0]
    #[cfg_attr(feature = "cli", arg(long, value_name = "SHARE", help_heading = "Adapter"))]
    #[cfg_attr(feature = "schema", schema(minimum = 0, exclusive_maximum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f32>,

    /// Layers: full (all of the blocks), style (double blocks), identity (single blocks 0 to 12), or names such as
    /// attn.to_q and transformer_blocks.*.ff.*, separated by commas [default: full]
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "LAYERS", value_delimiter = ',', help_heading = "Adapter")
    )]
    #[cfg_attr(feature = "schema", schema(value_type = kiln_engine::OneOrMany<String>))]
    #[serde(with = "wire::comma_list", skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<String>,

    /// Ranks of double blocks' attention, their MLPs, single blocks' input and output, such as 128,64,64,32
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "A,B,C,D", value_delimiter = ',', help_heading = "Adapter")
    )]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,

    /// LoKr: size of the first factor [default: split evenly]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Adapter"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 4096))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factor: Option<u32>,

    /// Names of the LoRA's keys [default: diffusers]
    #[cfg_attr(feature = "cli", arg(long, value_name = "NAMES", help_heading = "Output"))]
    #[serde(alias = "names", skip_serializing_if = "Option::is_none")]
    pub layout: Option<LoraLayout>,

    /// Data type of the LoRA [default: bf16]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TYPE", help_heading = "Output"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_dtype: Option<SaveDtype>,

    /// Steps between checkpoints [default: 250]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Output"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_every: Option<u64>,

    /// Continue from the last checkpoint, as if it had never stopped; steps, learning rate, warm-up, schedule, clip and
    /// dtype may be others
    #[cfg_attr(feature = "cli", arg(long, conflicts_with = "overwrite", help_heading = "Output"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub resume: bool,

    /// Replace an existing LoRA and its training
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Output"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub overwrite: bool,

    /// Write files for TensorBoard, too
    #[cfg_attr(feature = "cli", arg(long, help_heading = "Output"))]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub tensorboard: bool,

    /// Steps between sample images; 0 generates none [default: 0; over HTTP, a fifth of the steps]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Samples"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_every: Option<u64>,

    /// Prompt of a sample; several by repeating the option [default: the first captions]
    #[cfg_attr(
        feature = "cli",
        arg(long = "sample-prompt", value_name = "PROMPT", help_heading = "Samples")
    )]
    #[cfg_attr(feature = "schema", schema(value_type = kiln_engine::OneOrMany<String>))]
    #[serde(
        alias = "sample_prompt",
        deserialize_with = "wire::one_or_many",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub sample_prompts: Vec<String>,

    /// Model to generate samples with, such as klein-4b: a distilled one is faster and closer to how the LoRA will be used
    /// [default: the distilled model of the same name if it is at hand, else the base model]
    #[cfg_attr(feature = "cli", arg(long, value_name = "MODEL", help_heading = "Samples"))]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_model: Option<PathBuf>,

    /// Steps of a sample [default: the model's]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Samples"))]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 1000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_steps: Option<u32>,

    /// Seed of the samples [default: 42]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", help_heading = "Samples"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_seed: Option<u64>,
}

fn is_empty(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

//! What `kiln convert` and `kiln quantize` are told.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kiln_tensor::packed::Format;

use super::ThreadArgs;

#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Folder of a model, or a file with a part of one
    pub input: PathBuf,
    /// What to write: a .safetensors or .gguf file, or a folder that does not exist yet
    pub out: PathBuf,
    /// Which part to take [default: the transformer, or the only one]
    #[arg(long, value_name = "PART")]
    pub part: Option<PartArg>,
    /// Whose names the tensors get [default: in a folder diffusers', in a file the original ones]
    #[arg(long, value_name = "WHOSE")]
    pub names: Option<NamesArg>,
    /// What all floats become [default: what they are, if the file can hold it, else bf16]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<PlainArg>,
    /// Bytes of a file at most, when a folder is written: 5G, 500M [default: 10G]
    #[arg(long, value_name = "SIZE", value_parser = crate::values::parse_bytes)]
    pub shard_size: Option<u64>,
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// The report as JSON
    #[arg(long)]
    pub json: bool,
    /// Say nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
}

/// A part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PartArg {
    /// The transformer
    Transformer,
    /// The text encoder
    TextEncoder,
    /// The autoencoder
    Vae,
}

/// Whose names tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NamesArg {
    /// diffusers' and transformers'
    Diffusers,
    /// Black Forest Labs', ComfyUI's and GGUF's; llama.cpp's for a text encoder
    Original,
}

/// Plain types of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlainArg {
    /// 32-bit floats
    F32,
    /// 16-bit floats of the range of 32-bit ones
    Bf16,
    /// 16-bit IEEE floats
    F16,
}

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Folder of a model, or a file with a part of one
    #[arg(value_name = "IN")]
    pub model: PathBuf,
    /// What to write: a folder that does not exist yet, with all parts of the model; or a .safetensors or .gguf file
    pub out: PathBuf,
    /// What the linear layers inside the blocks become
    #[arg(long, value_name = "TYPE")]
    pub to: TargetArg,
    /// Which part to take when OUT is a file [default: the transformer, or the only one]
    #[arg(long, value_name = "PART")]
    pub part: Option<PartArg>,
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// The report as JSON
    #[arg(long)]
    pub json: bool,
    /// Say nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
}

/// What weights can be rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TargetArg {
    /// 8-bit integers with a scale for each row
    Int8,
    /// 8-bit floats (e4m3) with a scale for each layer
    Fp8,
    /// 4-bit floats with a scale for 16 of them
    Nvfp4,
    /// GGUF, 8.5 bits a weight
    #[value(name = "q8_0")]
    Q8_0,
    /// GGUF, 6.6 bits
    #[value(name = "q6_k")]
    Q6K,
    /// GGUF, 5.5 bits
    #[value(name = "q5_k")]
    Q5K,
    /// GGUF, 4.5 bits
    #[value(name = "q4_k")]
    Q4K,
    /// GGUF, 3.4 bits
    #[value(name = "q3_k")]
    Q3K,
    /// GGUF, 2.6 bits
    #[value(name = "q2_k")]
    Q2K,
    /// GGUF, 6 bits
    #[value(name = "q5_1")]
    Q5_1,
    /// GGUF, 5.5 bits
    #[value(name = "q5_0")]
    Q5_0,
    /// GGUF, 5 bits
    #[value(name = "q4_1")]
    Q4_1,
    /// GGUF, 4.5 bits
    #[value(name = "q4_0")]
    Q4_0,
}

impl TargetArg {
    /// How weights are packed; 8-bit integers are no packing, but a way to compute.
    pub fn format(self) -> Option<Format> {
        match self {
            TargetArg::Int8 => None,
            TargetArg::Fp8 => Some(Format::F8E4M3),
            TargetArg::Nvfp4 => Some(Format::NvFp4),
            TargetArg::Q8_0 => Some(Format::Q8_0),
            TargetArg::Q6K => Some(Format::Q6K),
            TargetArg::Q5K => Some(Format::Q5K),
            TargetArg::Q4K => Some(Format::Q4K),
            TargetArg::Q3K => Some(Format::Q3K),
            TargetArg::Q2K => Some(Format::Q2K),
            TargetArg::Q5_1 => Some(Format::Q5_1),
            TargetArg::Q5_0 => Some(Format::Q5_0),
            TargetArg::Q4_1 => Some(Format::Q4_1),
            TargetArg::Q4_0 => Some(Format::Q4_0),
        }
    }

    /// Whether only GGUF files have it.
    pub fn is_gguf(self) -> bool {
        !matches!(self, TargetArg::Int8 | TargetArg::Fp8 | TargetArg::Nvfp4)
    }

    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            TargetArg::Int8 => "int8",
            TargetArg::Fp8 => "fp8",
            other => other.format().map_or("", Format::name),
        }
    }
}

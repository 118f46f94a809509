//! Arguments of `kiln convert` and `kiln quantize`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kiln_catalog::export::QuantType;
use kiln_family::Variant;
use kiln_weights::Component;

use super::ThreadArgs;
use super::components::variants;

#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// A model folder, a file with one of its components, or the name of a model
    pub input: PathBuf,
    /// Output: a .safetensors or .gguf file, or a new folder
    pub out: PathBuf,
    /// Component to convert [default: the transformer, or the only one]
    #[arg(long = "part", value_name = "COMPONENT")]
    pub component: Option<ComponentArg>,
    /// Naming scheme of the tensors [default: diffusers for a folder, original for a file]
    #[arg(long, value_name = "SCHEME")]
    pub names: Option<NamingArg>,
    /// Data type of the weights [default: unchanged if the file format has it, else bf16]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<FloatTypeArg>,
    /// Variant to record in the file [default: the input's]
    #[arg(long, value_name = "VARIANT", value_parser = variants())]
    pub variant: Option<Variant>,
    /// Largest size of a shard when writing a folder, such as 500M [default: 10G]
    #[arg(long, value_name = "SIZE", value_parser = crate::values::parse_bytes)]
    pub shard_size: Option<u64>,
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    /// Print only errors
    #[arg(short, long)]
    pub quiet: bool,
}

/// A component of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ComponentArg {
    /// The transformer
    Transformer,
    /// The text encoder
    TextEncoder,
    /// The autoencoder (VAE)
    Vae,
}

impl From<ComponentArg> for Component {
    fn from(component: ComponentArg) -> Component {
        match component {
            ComponentArg::Transformer => Component::Transformer,
            ComponentArg::TextEncoder => Component::TextEncoder,
            ComponentArg::Vae => Component::Vae,
        }
    }
}

/// A naming scheme of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NamingArg {
    /// As in diffusers and transformers
    Diffusers,
    /// As in Black Forest Labs' files, ComfyUI and GGUF; as in llama.cpp for a text encoder
    Original,
}

/// A floating-point type of unquantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FloatTypeArg {
    /// 32-bit floats
    F32,
    /// bfloat16
    Bf16,
    /// 16-bit IEEE floats
    F16,
}

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// A model folder, a file with one of its components, or the name of a model
    #[arg(value_name = "IN")]
    pub model: PathBuf,
    /// Output: a new folder with the whole model, or a .safetensors or .gguf file with one component
    pub out: PathBuf,
    /// Type of the quantized layers: the linear layers inside the blocks
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    pub to: QuantType,
    /// Component to quantize [default: the transformer, or the only one]
    #[arg(long = "part", value_name = "COMPONENT")]
    pub component: Option<ComponentArg>,
    /// Variant to record in the file [default: the input's]
    #[arg(long, value_name = "VARIANT", value_parser = variants())]
    pub variant: Option<Variant>,
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    /// Print only errors
    #[arg(short, long)]
    pub quiet: bool,
}

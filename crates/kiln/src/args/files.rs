//! Arguments of `kiln convert` and `kiln quantize`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kiln_engine::Variant;
use kiln_tensor::packed::Format;
use kiln_weights::Component;
use kiln_weights::export::{Preset, Storage};

use super::ThreadArgs;

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
    #[arg(long, value_name = "VARIANT")]
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
    pub to: QuantTypeArg,
    /// Component to quantize [default: the transformer, or the only one]
    #[arg(long = "part", value_name = "COMPONENT")]
    pub component: Option<ComponentArg>,
    /// Variant to record in the file [default: the input's]
    #[arg(long, value_name = "VARIANT")]
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

/// A type that weights can be quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantTypeArg {
    /// 8-bit integers, one scale per row
    Int8,
    /// 8-bit floats (e4m3), one scale per layer
    Fp8,
    /// 4-bit floats, one scale per 16 weights
    Nvfp4,
    /// GGUF, 8.5 bits per weight
    #[value(name = "q8_0")]
    Q8_0,
    /// GGUF, 6.6 bits
    #[value(name = "q6_k")]
    Q6K,
    /// GGUF, q5_k with q6_k where it matters most
    #[value(name = "q5_k_m")]
    Q5KM,
    /// GGUF, q5_k under llama.cpp's name
    #[value(name = "q5_k_s")]
    Q5KS,
    /// GGUF, 5.5 bits
    #[value(name = "q5_k")]
    Q5K,
    /// GGUF, q4_k with q5_k and q6_k where it matters most
    #[value(name = "q4_k_m")]
    Q4KM,
    /// GGUF, q4_k with some q5_k
    #[value(name = "q4_k_s")]
    Q4KS,
    /// GGUF, 4.5 bits
    #[value(name = "q4_k")]
    Q4K,
    /// GGUF, q3_k with much q5_k and q4_k
    #[value(name = "q3_k_l")]
    Q3KL,
    /// GGUF, q3_k with some q4_k and q5_k
    #[value(name = "q3_k_m")]
    Q3KM,
    /// GGUF, q3_k under llama.cpp's name
    #[value(name = "q3_k_s")]
    Q3KS,
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

impl QuantTypeArg {
    /// Returns how the weights are stored; `None` for int8, which is a form to compute in, not a packed format.
    pub fn storage(self) -> Option<Storage> {
        let format = match self {
            QuantTypeArg::Int8 => return None,
            QuantTypeArg::Fp8 => Format::F8E4M3,
            QuantTypeArg::Nvfp4 => Format::NvFp4,
            QuantTypeArg::Q8_0 => Format::Q8_0,
            QuantTypeArg::Q6K => Format::Q6K,
            QuantTypeArg::Q5K => Format::Q5K,
            QuantTypeArg::Q4K => Format::Q4K,
            QuantTypeArg::Q3K => Format::Q3K,
            QuantTypeArg::Q2K => Format::Q2K,
            QuantTypeArg::Q5_1 => Format::Q5_1,
            QuantTypeArg::Q5_0 => Format::Q5_0,
            QuantTypeArg::Q4_1 => Format::Q4_1,
            QuantTypeArg::Q4_0 => Format::Q4_0,
            QuantTypeArg::Q5KM => return Some(Storage::Preset(Preset::Q5KM)),
            QuantTypeArg::Q5KS => return Some(Storage::Preset(Preset::Q5KS)),
            QuantTypeArg::Q4KM => return Some(Storage::Preset(Preset::Q4KM)),
            QuantTypeArg::Q4KS => return Some(Storage::Preset(Preset::Q4KS)),
            QuantTypeArg::Q3KL => return Some(Storage::Preset(Preset::Q3KL)),
            QuantTypeArg::Q3KM => return Some(Storage::Preset(Preset::Q3KM)),
            QuantTypeArg::Q3KS => return Some(Storage::Preset(Preset::Q3KS)),
        };
        Some(Storage::Quantized(format))
    }

    /// Returns whether only GGUF files can hold the type; no others can.
    pub fn is_gguf(self) -> bool {
        !matches!(self, QuantTypeArg::Int8 | QuantTypeArg::Fp8 | QuantTypeArg::Nvfp4)
    }

    /// Returns the name of the type on the command line.
    pub fn name(self) -> &'static str {
        match self.storage() {
            None => "int8",
            Some(Storage::Quantized(Format::F8E4M3)) => "fp8",
            Some(Storage::Quantized(format)) => format.name(),
            Some(Storage::Preset(preset)) => preset.name(),
            Some(Storage::Keep | Storage::Dense(_)) => "",
        }
    }
}

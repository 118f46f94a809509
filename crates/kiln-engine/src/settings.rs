//! How the machine is to be used.

use std::path::PathBuf;

pub use kiln_cpu::Isa;
use kiln_tensor::DType;

use crate::text_cache::TextCache;

/// Where to compute, in what, and with how much.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Where to compute.
    pub device: Device,
    /// Bytes of a GPU's memory that may be taken: what doesn't fit is brought in as it is used.
    pub vram_limit: Option<u64>,
    /// What to compute in.
    pub precision: Precision,
    /// Threads of the CPU; as many as the machine runs at once when absent.
    pub threads: Option<usize>,
    /// Vector instructions of the CPU; the best the machine has when absent.
    pub isa: Option<Isa>,
    /// When a GPU's work is recorded and replayed.
    pub graphs: Graphs,
    /// Where compiled kernels are kept.
    pub kernel_cache: Option<PathBuf>,
    /// Where encoded texts are kept.
    pub text_cache: Option<TextCache>,
    /// An autoencoder for previews.
    pub preview_vae: Option<PathBuf>,
}

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// A GPU that has room for the model, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU by number.
    Cuda(usize),
}

impl Device {
    /// `auto`, `cpu`, `cuda` or `cuda:N`.
    pub fn parse(text: &str) -> Result<Device, String> {
        let number = |n: &str| n.parse().map(Device::Cuda);
        match (text, text.strip_prefix("cuda:").map(number)) {
            ("auto", _) => Ok(Device::Auto),
            ("cpu", _) => Ok(Device::Cpu),
            ("cuda", _) => Ok(Device::Cuda(0)),
            (_, Some(Ok(device))) => Ok(device),
            _ => Err("expected auto, cpu, cuda or cuda:N".into()),
        }
    }
}

/// What is computed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Precision {
    /// int8 for a model that `kiln quantize` made, bf16 on a GPU or where the CPU has AMX and the weights have 16 bits, else f32
    #[default]
    Auto,
    /// 32-bit floats
    F32,
    /// 16-bit floats; weights stored as 8-bit floats are multiplied as such where the GPU can
    Bf16,
    /// Products of 8-bit integers inside the transformer's blocks, bf16 around them
    Int8,
    /// Products of 8-bit floats inside the transformer's blocks, bf16 around them; for GPUs from Ada on
    Fp8,
}

impl Precision {
    /// The dtype of activations.
    pub fn dtype(self) -> DType {
        match self {
            Precision::Auto | Precision::F32 => DType::F32,
            Precision::Bf16 | Precision::Int8 | Precision::Fp8 => DType::BF16,
        }
    }

    /// The word on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Auto | Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Int8 => "int8",
            Precision::Fp8 => "fp8",
        }
    }

    /// What a recipe's word means.
    pub fn by_name(name: &str) -> Precision {
        match name {
            "bf16" => Precision::Bf16,
            "int8" => Precision::Int8,
            "fp8" => Precision::Fp8,
            _ => Precision::F32,
        }
    }
}

/// When a GPU's work is recorded as a CUDA graph, which is one launch instead of hundreds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Graphs {
    /// Where launching takes about as long as the work
    #[default]
    Auto,
    /// Wherever it can be
    Always,
    /// Nowhere
    Never,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_with_or_without_a_number() {
        assert_eq!(Device::parse("cuda"), Ok(Device::Cuda(0)));
        assert_eq!(Device::parse("cuda:3"), Ok(Device::Cuda(3)));
        assert_eq!(Device::parse("auto"), Ok(Device::Auto));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "CPU"] {
            assert!(Device::parse(wrong).is_err(), "{wrong}");
        }
    }
}

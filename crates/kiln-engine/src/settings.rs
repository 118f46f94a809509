//! Which hardware to use, and how.

use std::fmt;
use std::path::PathBuf;

pub use kiln_cpu::Isa;
use kiln_tensor::DType;

use crate::text_cache::TextCache;

/// Device, precision, memory limits and caches of an engine.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The device.
    pub device: Device,
    /// Maximum GPU memory to use, in bytes; weights that don't fit are streamed.
    pub vram_limit: Option<u64>,
    /// The precision.
    pub precision: Precision,
    /// CPU threads; as many as the machine runs at once if absent.
    pub threads: Option<usize>,
    /// The CPU's vector instruction set; the best available if absent.
    pub isa: Option<Isa>,
    /// When transformer calls are captured as CUDA graphs.
    pub graphs: CudaGraphs,
    /// The GPUs whose CUDA kernels run; the GPU's own if absent.
    pub cuda_kernels: Option<CudaKernels>,
    /// Folder for compiled GPU kernels.
    pub kernel_cache: Option<PathBuf>,
    /// Cache of encoded prompts.
    pub text_cache: Option<TextCache>,
    /// A VAE for previews; a linear approximation if absent.
    pub preview_vae: Option<PathBuf>,
}

impl Settings {
    /// The largest number of CPU threads that makes sense; more is a mistake.
    pub const MAX_THREADS: usize = 1024;
    /// Images that are generated together where that is faster; more gain nothing.
    pub const MAX_BATCH: usize = 4;
}

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// A GPU that can hold the model, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this number.
    Cuda(usize),
    /// Any GPU: the adapter with this number among those of an interface, or among all.
    Wgpu(Option<GpuApi>, usize),
}

/// An interface to a GPU's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuApi {
    /// Vulkan.
    Vulkan,
    /// Metal.
    Metal,
    /// DirectX 12.
    Dx12,
}

impl Device {
    /// What [`Device::parse`] takes.
    pub const NAMES: &str = "auto, cpu, cuda or cuda:N, wgpu, vulkan, metal or dx12, with :N, too";

    /// Parses `auto`, `cpu`, or the name of a kind of GPU, with a number or without: `cuda`, `cuda:1`, `vulkan:0`.
    pub fn parse(text: &str) -> Result<Device, String> {
        let (kind, number) = match text.split_once(':') {
            Some((kind, number)) => (kind, number.parse().ok()),
            None => (text, Some(0)),
        };
        match (text, kind, number) {
            ("auto", ..) => Ok(Device::Auto),
            ("cpu", ..) => Ok(Device::Cpu),
            (_, "cuda", Some(number)) => Ok(Device::Cuda(number)),
            (_, "wgpu", Some(number)) => Ok(Device::Wgpu(None, number)),
            (_, "vulkan", Some(number)) => Ok(Device::Wgpu(Some(GpuApi::Vulkan), number)),
            (_, "metal", Some(number)) => Ok(Device::Wgpu(Some(GpuApi::Metal), number)),
            (_, "dx12", Some(number)) => Ok(Device::Wgpu(Some(GpuApi::Dx12), number)),
            _ => Err(format!("expected {}", Device::NAMES)),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, number) = match self {
            Device::Auto => return f.write_str("auto"),
            Device::Cpu => return f.write_str("cpu"),
            Device::Cuda(number) => ("cuda", number),
            Device::Wgpu(None, number) => ("wgpu", number),
            Device::Wgpu(Some(GpuApi::Vulkan), number) => ("vulkan", number),
            Device::Wgpu(Some(GpuApi::Metal), number) => ("metal", number),
            Device::Wgpu(Some(GpuApi::Dx12), number) => ("dx12", number),
        };
        write!(f, "{kind}:{number}")
    }
}

/// The precision of the computation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Precision {
    /// int8 for a model that `kiln quantize` wrote, bf16 on a GPU or on a CPU with AMX and 16-bit weights, else f32
    #[default]
    Auto,
    /// 32-bit floats
    F32,
    /// 16-bit floats; fp8 weights use fp8 matmuls where the GPU has them
    Bf16,
    /// int8 matmuls inside the transformer's blocks, bf16 elsewhere
    Int8,
    /// fp8 matmuls inside the transformer's blocks, and 8-bit attention on Hopper; bf16 elsewhere; needs an Ada GPU or newer
    Fp8,
}

impl Precision {
    /// Parses `auto`, `f32`, `bf16`, `int8` or `fp8`.
    pub fn parse(text: &str) -> Result<Precision, String> {
        match text {
            "auto" => Ok(Precision::Auto),
            "f32" => Ok(Precision::F32),
            "bf16" => Ok(Precision::Bf16),
            "int8" => Ok(Precision::Int8),
            "fp8" => Ok(Precision::Fp8),
            _ => Err("expected auto, f32, bf16, int8 or fp8".into()),
        }
    }

    /// Returns the dtype of activations.
    pub fn dtype(self) -> DType {
        match self {
            Precision::Auto | Precision::F32 => DType::F32,
            Precision::Bf16 | Precision::Int8 | Precision::Fp8 => DType::BF16,
        }
    }

    /// Returns its name on the command line and in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Auto | Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Int8 => "int8",
            Precision::Fp8 => "fp8",
        }
    }

    /// Returns the precision that a recipe names; f32 for unknown names.
    pub fn from_name(name: &str) -> Precision {
        match name {
            "bf16" => Precision::Bf16,
            "int8" => Precision::Int8,
            "fp8" => Precision::Fp8,
            _ => Precision::F32,
        }
    }
}

/// When transformer calls are captured as CUDA graphs, which replaces hundreds of launches by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum CudaGraphs {
    /// Where launching kernels takes about as long as running them
    #[default]
    Auto,
    /// Wherever possible
    Always,
    /// Never
    Never,
}

/// The GPUs, by compute capability, that CUDA kernels are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum CudaKernels {
    /// Ampere: A100
    #[cfg_attr(feature = "cli", value(name = "8.0"))]
    Sm80,
    /// Ampere: RTX 30
    #[cfg_attr(feature = "cli", value(name = "8.6"))]
    Sm86,
    /// Ada: RTX 40
    #[cfg_attr(feature = "cli", value(name = "8.9"))]
    Sm89,
    /// Hopper: H100, H200
    #[cfg_attr(feature = "cli", value(name = "9.0"))]
    Sm90,
}

impl CudaKernels {
    /// Returns the compute capability: major, minor.
    pub fn capability(self) -> (i32, i32) {
        match self {
            CudaKernels::Sm80 => (8, 0),
            CudaKernels::Sm86 => (8, 6),
            CudaKernels::Sm89 => (8, 9),
            CudaKernels::Sm90 => (9, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_with_or_without_a_number() {
        assert_eq!(Device::parse("cuda"), Ok(Device::Cuda(0)));
        assert_eq!(Device::parse("cuda:3"), Ok(Device::Cuda(3)));
        assert_eq!(Device::parse("auto"), Ok(Device::Auto));
        assert_eq!(Device::parse("vulkan"), Ok(Device::Wgpu(Some(GpuApi::Vulkan), 0)));
        assert_eq!(Device::parse("wgpu:1"), Ok(Device::Wgpu(None, 1)));
        for text in ["auto", "cpu", "cuda:2", "wgpu:0", "vulkan:1", "metal:0", "dx12:3"] {
            assert_eq!(Device::parse(text).map(|device| device.to_string()), Ok(text.to_owned()));
        }
        for wrong in ["", "gpu", "cuda:", "cuda:x", "CPU", "cpu:0", "vulkan:-1"] {
            assert!(Device::parse(wrong).is_err(), "{wrong}");
        }
    }
}

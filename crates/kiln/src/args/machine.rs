//! Arguments about the machine, shared by the commands that compute.

use clap::{Args, ValueEnum};

use kiln_engine::{CudaKernels, Device, Isa, Precision, Settings};

/// More than any machine has: a typo must not start a hundred thousand threads.
const MAX_THREADS: i64 = Settings::MAX_THREADS as i64;

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineArgs {
    /// Device: auto, cpu, cuda or cuda:N, or any GPU by wgpu, vulkan, metal or dx12, with :N for another than the first;
    /// auto is an NVIDIA GPU with enough memory for the model, else the CPU; in `bench` it is the CPU. `serve` and
    /// `worker` take several, such as cuda:0,cuda:1, and generate on all of them [default: auto]
    #[arg(long, value_name = "DEVICE", value_parser = Device::parse, value_delimiter = ',')]
    pub device: Vec<Device>,

    /// Limit for GPU memory, such as 6G; weights that don't fit are streamed as they are used
    #[arg(long, value_name = "SIZE", value_parser = crate::values::parse_bytes)]
    pub vram_limit: Option<u64>,

    /// Data type to compute in [default: auto]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<Precision>,

    #[command(flatten)]
    pub threads: ThreadArgs,

    /// CPU instruction set to use [default: the best available]
    #[arg(long, value_name = "SET")]
    pub cpu_isa: Option<IsaArg>,

    /// CUDA kernels to use, by compute capability: its own or those of an older GPU, to test them [default: the GPU's own]
    #[arg(long, value_name = "CAPABILITY")]
    pub cuda_kernels: Option<CudaKernels>,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct ThreadArgs {
    /// Number of CPU threads [default: all the machine has]
    #[arg(
        long = "threads", value_name = "N", help_heading = "Machine", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=MAX_THREADS)
    )]
    pub number: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    Portable,
    Neon,
    NeonDotprod,
    NeonI8mm,
    NeonBf16,
    Avx2,
    Avx512,
    Amx,
}

impl From<IsaArg> for Isa {
    fn from(arg: IsaArg) -> Isa {
        match arg {
            IsaArg::Portable => Isa::Portable,
            IsaArg::Neon => Isa::Neon,
            IsaArg::NeonDotprod => Isa::NeonDotprod,
            IsaArg::NeonI8mm => Isa::NeonI8mm,
            IsaArg::NeonBf16 => Isa::NeonBf16,
            IsaArg::Avx2 => Isa::Avx2,
            IsaArg::Avx512 => Isa::Avx512,
            IsaArg::Amx => Isa::Amx,
        }
    }
}

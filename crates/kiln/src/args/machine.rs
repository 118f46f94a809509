//! What every command that computes is told about the machine.

use clap::{Args, ValueEnum};

use crate::values::Device;

/// More than any machine runs at once; a typing error must not start a hundred thousand.
const MAX_THREADS: i64 = 1024;

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineArgs {
    /// Where to compute: auto, cpu, cuda or cuda:N; auto is a GPU that has room for the model, else the CPU; `bench`
    /// takes the CPU unless told otherwise [default: auto]
    #[arg(long, value_name = "DEVICE", value_parser = Device::parse)]
    pub device: Option<Device>,

    /// Take no more than this of a GPU's memory, such as 6G: what doesn't fit is brought in as it is used
    #[arg(long, value_name = "SIZE", value_parser = crate::values::parse_bytes)]
    pub vram_limit: Option<u64>,

    /// What to compute in; auto is int8 for a model that `kiln quantize` made, bf16 on a GPU, or if the CPU has AMX and
    /// the weights have 16 bits, else f32 [default: auto]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<DTypeArg>,

    #[command(flatten)]
    pub threads: ThreadArgs,

    /// Vector instructions to use [default: the best the machine has]
    #[arg(long, value_name = "SET")]
    pub cpu_isa: Option<IsaArg>,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct ThreadArgs {
    /// Threads [default: as many as the machine runs at once]
    #[arg(
        long = "threads", value_name = "N", help_heading = "Machine", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=MAX_THREADS)
    )]
    pub number: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DTypeArg {
    #[default]
    Auto,
    F32,
    /// 16-bit floats; weights stored as 8-bit floats are multiplied as such where the GPU can
    Bf16,
    /// Products of 8-bit integers inside the transformer's blocks, bf16 around them
    Int8,
    /// Products of 8-bit floats inside the transformer's blocks, bf16 around them; for GPUs from Ada on
    Fp8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    Portable,
    Neon,
    Avx2,
    Avx512,
    Amx,
}

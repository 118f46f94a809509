//! Which machine computes: the one place that knows of every kind of backend.

use kiln_cpu::{CpuBackend, Isa};
use kiln_model::ModelFolder;
use kiln_tensor::DType;

use crate::args::{IsaArg, MachineArgs};
use crate::failure::{Failure, While};
use crate::machine;
use crate::values::Device;

/// A backend of some kind.
pub enum Chosen {
    Cpu(CpuBackend),
    #[cfg(feature = "cuda")]
    Cuda(Box<kiln_cuda::CudaBackend>),
}

impl Chosen {
    /// The backend for `device` and a model whose weights are so large. With `auto`, a GPU that has room for it; the sentence
    /// says why not where there is a GPU and it isn't taken.
    pub fn for_model(
        args: &MachineArgs,
        device: Device,
        weights: u64,
    ) -> Result<(Chosen, Option<String>), Failure> {
        if device == Device::Auto {
            let (gpu, why) = find_gpu(weights);
            return Ok((gpu.map_or_else(|| Chosen::new(args, Device::Cpu), Ok)?, why));
        }
        Ok((Chosen::new(args, device)?, None))
    }

    /// The backend for `device`; `auto` is the CPU.
    pub fn new(args: &MachineArgs, device: Device) -> Result<Chosen, Failure> {
        match device {
            Device::Cpu | Device::Auto => Ok(Chosen::Cpu(cpu(args)?)),
            Device::Cuda(number) => cuda(number, args.vram_limit),
        }
    }

    /// The device's name, as `--device` takes it.
    pub fn device(&self) -> String {
        match self {
            Chosen::Cpu(_) => "cpu".into(),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(backend) => format!("cuda:{}", backend.gpu().ordinal),
        }
    }

    /// What to compute in where nobody said so. A GPU is many times faster in bf16.
    pub fn suitable_dtype(&self, folder: &ModelFolder) -> DType {
        match self {
            Chosen::Cpu(backend) => suitable_dtype(backend.isa(), folder),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(_) => DType::BF16,
        }
    }

    /// Whether it makes products of 8-bit floats.
    pub fn has_fp8(&self) -> bool {
        match self {
            Chosen::Cpu(_) => false,
            #[cfg(feature = "cuda")]
            Chosen::Cuda(backend) => backend.gpu().has_fp8(),
        }
    }

    /// Threads of the processor for work that it does itself.
    pub fn threads(&self) -> usize {
        match self {
            Chosen::Cpu(backend) => backend.threads(),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(_) => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Bytes that a request may need before it is refused.
    pub fn memory_limit(&self) -> Option<u64> {
        match self {
            Chosen::Cpu(_) => machine::memory_limit(),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(backend) => backend.memory_free().ok().map(|bytes| bytes as u64),
        }
    }
}

/// The CPU's backend.
pub fn cpu(args: &MachineArgs) -> Result<CpuBackend, Failure> {
    let isa = args.cpu_isa.map(|isa| match isa {
        IsaArg::Portable => Isa::Portable,
        IsaArg::Neon => Isa::Neon,
        IsaArg::Avx2 => Isa::Avx2,
        IsaArg::Avx512 => Isa::Avx512,
        IsaArg::Amx => Isa::Amx,
    });
    let threads = args.threads.number.map(|n| n as usize);
    CpuBackend::new(kiln_cpu::Options { isa, threads }).while_doing(|| "starting the CPU backend".into())
}

/// bf16 where the machine multiplies it as it is and the weights have no more digits than that; else f32.
pub fn suitable_dtype(isa: Isa, folder: &ModelFolder) -> DType {
    // Weights that can't be opened are refused when they are loaded, with all that is to be said about them.
    let short = folder.transformer.weights().is_ok_and(|weights| {
        let (short, long): (Vec<_>, Vec<_>) =
            weights.dtypes().into_iter().partition(|(dtype, _)| dtype.size() <= 2);
        let count = |dtypes: Vec<(DType, u64)>| dtypes.iter().map(|(_, n)| n).sum::<u64>();
        count(short) > count(long)
    });
    if isa.multiplies_bf16() && short { DType::BF16 } else { DType::F32 }
}

const USE_THE_CPU: &str = "leave --device out, or say --device cpu, to compute on the CPU";

/// Kernels are kept beside what else is kept.
#[cfg(feature = "cuda")]
fn cuda_options(device: usize) -> kiln_cuda::Options {
    let cache = crate::cache::folder().map(|folder| folder.join("cuda"));
    kiln_cuda::Options { device, cache, ..Default::default() }
}

#[cfg(feature = "cuda")]
fn cuda(number: usize, vram: Option<u64>) -> Result<Chosen, Failure> {
    let memory_limit = vram.and_then(|bytes| usize::try_from(bytes).ok());
    match kiln_cuda::CudaBackend::new(&kiln_cuda::Options { memory_limit, ..cuda_options(number) }) {
        Ok(backend) => Ok(Chosen::Cuda(Box::new(backend))),
        Err(e) => Err(Failure::new(format!("cuda:{number} can't be used: {e}")).hint(USE_THE_CPU)),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize, _: Option<u64>) -> Result<Chosen, Failure> {
    Err(Failure::new("this build of Kiln has no CUDA backend").hint(USE_THE_CPU))
}

/// What a picture takes beside the weights, roughly.
#[cfg(feature = "cuda")]
const GPU_WORK: u64 = 2 << 30;

#[cfg(feature = "cuda")]
fn find_gpu(weights: u64) -> (Option<Chosen>, Option<String>) {
    use kiln_cuda::Error;
    let needed = weights.saturating_add(GPU_WORK);
    let found = kiln_cuda::CudaBackend::new(&cuda_options(0));
    let free = |backend: &kiln_cuda::CudaBackend| backend.memory_free().unwrap_or(0) as u64;
    match found {
        Ok(backend) if free(&backend) >= needed => (Some(Chosen::Cuda(Box::new(backend))), None),
        Ok(backend) => {
            let (needed, free) = (crate::values::bytes(needed), crate::values::bytes(free(&backend)));
            let name = &backend.gpu().name;
            let why =
                format!("the GPU is not used: this model takes about {needed}, and {name} has {free} free");
            (None, Some(why))
        }
        // A machine without an NVIDIA GPU has nothing to be told.
        Err(Error::NoDevice { .. }) => (None, None),
        Err(Error::Missing { library, .. }) if library == kiln_cuda::Wanted::Driver.name() => (None, None),
        Err(e) => (None, Some(format!("the GPU is not used: {e}"))),
    }
}

#[cfg(not(feature = "cuda"))]
fn find_gpu(_: u64) -> (Option<Chosen>, Option<String>) {
    (None, None)
}

/// Which weights stay within `limit` bytes of a GPU's memory.
pub fn placement(
    weights: kiln_model::WeightBytes,
    need: &kiln_model::MemoryNeed,
    limit: u64,
) -> Result<kiln_model::Placement, Failure> {
    kiln_model::Placement::new(weights, need, limit).map_err(|least| {
        let (limit, least) = (crate::values::bytes(limit), crate::values::bytes(least));
        Failure::new(format!(
            "{limit} of the GPU's memory are too little for this picture: it takes {least} at least"
        ))
        .hint("raise --vram-limit, choose a smaller size with -W and -H, or say --device cpu")
    })
}

/// Bytes of a model's weights: of its files, or of what is inside the program.
pub fn weight_bytes(folder: &ModelFolder) -> u64 {
    fn part<C>(part: Option<&kiln_model::Part<C>>) -> u64 {
        let source = part.and_then(|part| part.weights().ok());
        source.map_or(0, |source| source.files().filter_map(|file| Some(file.metadata().ok()?.len())).sum())
    }
    part(Some(&folder.transformer)) + part(folder.text_encoder.as_ref()) + part(folder.vae.as_ref())
}

//! Which machine computes: the one place that knows of every kind of backend.

use kiln_cpu::{CpuBackend, Isa};
use kiln_model::{MemoryNeed, ModelFolder, Placement, WeightBytes};
use kiln_tensor::DType;
use kiln_weights::{LinearForm, WeightSource};

use crate::args::{GraphsArg, IsaArg, MachineArgs};
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
    /// The backend for `device` and a model whose weights are so large. With `auto`, a GPU that has room for it, or any if a
    /// limit says how much of it may be taken; the sentence says why not where there is a GPU and it isn't taken.
    pub fn for_model(
        args: &MachineArgs,
        device: Device,
        weights: u64,
    ) -> Result<(Chosen, Option<String>), Failure> {
        let (gpu, why) = match device {
            Device::Auto => find_gpu(weights, args.vram_limit),
            _ => (None, None),
        };
        let chosen = gpu.map_or_else(|| Chosen::new(args, device), Ok)?;
        let vain = args.vram_limit.is_some() && chosen.vram().is_none();
        let why = why.or_else(|| vain.then(|| "--vram-limit has no effect: the CPU computes".into()));
        Ok((chosen, why))
    }

    /// The backend for `device`; `auto` is the CPU.
    pub fn new(args: &MachineArgs, device: Device) -> Result<Chosen, Failure> {
        match device {
            Device::Cpu | Device::Auto => Ok(Chosen::Cpu(cpu(args)?)),
            Device::Cuda(number) => cuda(number, args.vram_limit, GraphsArg::Auto),
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

    /// Whether 8-bit weights take memory beside their file.
    pub fn copies_integers(&self) -> bool {
        match self {
            Chosen::Cpu(backend) => backend.copies_integers(),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(_) => false,
        }
    }

    /// Bytes that a request may need before it is refused.
    pub fn memory_limit(&self) -> Option<u64> {
        match self {
            Chosen::Cpu(_) => machine::memory_limit(),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(_) => self.vram(),
        }
    }

    /// Bytes of a GPU's memory that may be taken; `None` where the CPU computes.
    pub fn vram(&self) -> Option<u64> {
        match self {
            Chosen::Cpu(_) => None,
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
fn cuda_options(device: usize, vram: Option<u64>) -> kiln_cuda::Options {
    let cache = crate::cache::folder().map(|folder| folder.join("cuda"));
    let memory_limit = vram.and_then(|bytes| usize::try_from(bytes).ok());
    kiln_cuda::Options { device, cache, memory_limit, ..Default::default() }
}

/// The GPU of this number.
#[cfg(feature = "cuda")]
pub fn cuda(number: usize, vram: Option<u64>, graphs: GraphsArg) -> Result<Chosen, Failure> {
    let graphs = match graphs {
        GraphsArg::Auto => kiln_cuda::Graphs::Auto,
        GraphsArg::Always => kiln_cuda::Graphs::Always,
        GraphsArg::Never => kiln_cuda::Graphs::Never,
    };
    match kiln_cuda::CudaBackend::new(&kiln_cuda::Options { graphs, ..cuda_options(number, vram) }) {
        Ok(backend) => Ok(Chosen::Cuda(Box::new(backend))),
        Err(e) => Err(Failure::new(format!("cuda:{number} can't be used: {e}")).hint(USE_THE_CPU)),
    }
}

#[cfg(not(feature = "cuda"))]
pub fn cuda(_: usize, _: Option<u64>, _: GraphsArg) -> Result<Chosen, Failure> {
    Err(Failure::new("this build of Kiln has no CUDA backend").hint(USE_THE_CPU))
}

/// What a picture takes beside the weights, roughly.
#[cfg(feature = "cuda")]
const GPU_WORK: u64 = 2 << 30;

#[cfg(feature = "cuda")]
fn find_gpu(weights: u64, vram: Option<u64>) -> (Option<Chosen>, Option<String>) {
    use kiln_cuda::Error;
    // Whoever names a limit knows that not everything may fit.
    let needed = if vram.is_some() { 0 } else { weights.saturating_add(GPU_WORK) };
    let found = kiln_cuda::CudaBackend::new(&cuda_options(0, vram));
    let free = |backend: &kiln_cuda::CudaBackend| backend.memory_free().unwrap_or(0) as u64;
    match found {
        Ok(backend) if free(&backend) >= needed => (Some(Chosen::Cuda(Box::new(backend))), None),
        Ok(backend) => {
            let (needed, free) = (crate::values::bytes(needed), crate::values::bytes(free(&backend)));
            let name = &backend.gpu().name;
            let why = format!(
                "the GPU is not used: this model takes about {needed}, and {name} has {free} free; with --device cuda, \
                 what doesn't fit is brought in as it is used"
            );
            (None, Some(why))
        }
        // A machine without an NVIDIA GPU has nothing to be told.
        Err(Error::NoDevice { .. }) => (None, None),
        Err(Error::Missing { library, .. }) if library == kiln_cuda::Wanted::Driver.name() => (None, None),
        Err(e) => (None, Some(format!("the GPU is not used: {e}"))),
    }
}

#[cfg(not(feature = "cuda"))]
fn find_gpu(_: u64, _: Option<u64>) -> (Option<Chosen>, Option<String>) {
    (None, None)
}

/// Which of a model's weights stay on the GPU while it serves requests of that need; `None` where all do, or where there is
/// no GPU.
pub fn place(
    chosen: &Chosen,
    folder: &ModelFolder,
    form: LinearForm,
    need: &MemoryNeed,
) -> Result<Option<Placement>, Failure> {
    let Some(vram) = chosen.vram() else { return Ok(None) };
    // Weights that can't be opened are told of when they are loaded.
    let stored = |source: kiln_model::Result<WeightSource>| source.map_or(2.0, |s| s.bytes_per_weight());
    let text = folder.text_encoder.as_ref().map(|part| (&part.config, stored(part.weights())));
    let transformer = (&folder.transformer.config, stored(folder.transformer.weights()));
    let weights = WeightBytes::new(text, transformer, form);
    Ok(Some(placement(weights, need, vram)?).filter(|placement| !placement.is_whole()))
}

/// Which weights stay within `limit` bytes of a GPU's memory.
pub fn placement(weights: WeightBytes, need: &MemoryNeed, limit: u64) -> Result<Placement, Failure> {
    Placement::new(weights, need, limit).map_err(|least| {
        // Rounded up: who says that number again must not be refused.
        let least = least.div_ceil(100 << 20) * 100;
        let limit = crate::values::bytes(limit);
        Failure::new(format!("{limit} of the GPU's memory are too little for this picture")).hint(format!(
            "--vram-limit {least}M would do; a smaller size (-W, -H) takes less, --device cpu nothing"
        ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_too_small_is_refused_with_one_that_does() {
        let weights =
            WeightBytes { text_encoder: 6 << 30, transformer: 7 << 30, largest: 170 << 20, written_out: 0 };
        let need = MemoryNeed { transformer: 500 << 20, autoencoder: 1600 << 20 };
        let failure = placement(weights, &need, 1 << 30).unwrap_err();
        assert!(failure.message.starts_with("1.0 GiB of the GPU's memory are too little"), "{failure}");
        let hint = failure.hint.unwrap();
        let named = hint.split_whitespace().nth(1).unwrap();
        let enough = crate::values::parse_bytes(named).unwrap();
        assert_eq!(placement(weights, &need, enough).unwrap().transformer, 0);
        assert!(placement(weights, &need, enough - (100 << 20)).is_err(), "{named} is more than it takes");
    }
}

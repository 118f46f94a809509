//! The backend that computes: the one place that knows of every kind.

use kiln_cpu::CpuBackend;
use kiln_ops::Backend;
use kiln_tensor::DType;

use crate::engine::Counters;
use crate::error::{Error, Result};
use crate::local::DeviceWatch;
use crate::machine;
use crate::model::Model;
use crate::settings::{Device, Precision, Settings};

const USE_THE_CPU: &str = "leave --device out, or say --device cpu, to compute on the CPU";

/// A backend of some kind.
pub(crate) enum AnyBackend {
    Cpu(CpuBackend),
    #[cfg(feature = "cuda")]
    Cuda(Box<kiln_cuda::CudaBackend>),
}

/// Work for a backend of any kind.
pub trait WithBackend {
    /// What comes of it.
    type Result;

    /// Does it with this backend.
    fn with<B: Backend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Self::Result;
}

/// What a device tells of itself.
pub struct DeviceInfo<B> {
    /// As `--device` takes it.
    pub device: String,
    /// Whether it works behind the caller's back.
    pub is_asynchronous: bool,
    /// The CPU's instruction set, where that is what computes.
    pub isa: Option<kiln_cpu::Isa>,
    /// Threads of the CPU for work that it does itself.
    pub threads: usize,
    /// Bytes of a GPU's memory that may be taken.
    pub vram: Option<u64>,
    /// Whether it makes products of 8-bit floats.
    pub has_fp8: bool,
    pub(crate) watch: DeviceWatch<B>,
}

impl<B> DeviceInfo<B> {
    /// What the device counts.
    pub fn counters(&self, backend: &B) -> Counters {
        (self.watch.counters)(backend)
    }

    /// What to compute in where nobody said so.
    pub fn suitable_precision(&self, model: &Model) -> Precision {
        match self.isa.map(|isa| suitable_dtype(isa, model)) {
            Some(DType::F32) => Precision::F32,
            _ => Precision::Bf16,
        }
    }

    /// Gives memory that nothing needs back to the device, and counts the most that is in use anew.
    pub fn release_memory(&self, backend: &B) {
        (self.watch.release_memory)(backend);
    }
}

/// Does `work` with the backend that `settings` name; `auto` is the CPU.
pub fn with_backend<W: WithBackend>(settings: &Settings, work: W) -> Result<W::Result> {
    Ok(AnyBackend::new(settings)?.with(work))
}

impl AnyBackend {
    /// The backend for a model whose weights take so many bytes. With `auto`, a GPU that has room for it, or any if a limit says
    /// how much of it may be taken; the sentence says why not where there is a GPU and it isn't taken.
    pub fn for_model(settings: &Settings, weights: u64) -> Result<(AnyBackend, Option<String>)> {
        let (gpu, why) = match settings.device {
            Device::Auto => find_gpu(weights, settings),
            _ => (None, None),
        };
        let chosen = gpu.map_or_else(|| AnyBackend::new(settings), Ok)?;
        let vain = settings.vram_limit.is_some() && chosen.vram().is_none();
        let why = why.or_else(|| vain.then(|| "--vram-limit has no effect: the CPU computes".into()));
        Ok((chosen, why))
    }

    /// The backend for the device of `settings`; `auto` is the CPU.
    fn new(settings: &Settings) -> Result<AnyBackend> {
        match settings.device {
            Device::Cpu | Device::Auto => {
                let options = kiln_cpu::Options { isa: settings.isa, threads: settings.threads };
                Ok(AnyBackend::Cpu(CpuBackend::new(options)?))
            }
            Device::Cuda(number) => cuda(number, settings),
        }
    }

    /// Does `work` with it.
    pub fn with<W: WithBackend>(self, work: W) -> W::Result {
        let (device, threads, vram, has_fp8) = (self.device(), self.threads(), self.vram(), self.has_fp8());
        match self {
            AnyBackend::Cpu(backend) => {
                let watch = DeviceWatch {
                    free_memory: |_| machine::memory_limit(),
                    counters: |_| Counters::default(),
                    release_memory: |_| {},
                };
                let isa = Some(backend.isa());
                work.with(
                    backend,
                    DeviceInfo { device, is_asynchronous: false, isa, threads, vram, has_fp8, watch },
                )
            }
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => {
                let watch = DeviceWatch {
                    free_memory: |b: &kiln_cuda::CudaBackend| b.memory_free().ok().map(|bytes| bytes as u64),
                    counters: |b: &kiln_cuda::CudaBackend| Counters {
                        replayed: b.replayed(),
                        peak_memory: b.memory_peak() as u64,
                    },
                    release_memory: |b: &kiln_cuda::CudaBackend| b.release_memory(),
                };
                let info =
                    DeviceInfo { device, is_asynchronous: true, isa: None, threads, vram, has_fp8, watch };
                work.with(*backend, info)
            }
        }
    }

    /// The device's name, as `--device` takes it.
    pub fn device(&self) -> String {
        match self {
            AnyBackend::Cpu(_) => "cpu".into(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => format!("cuda:{}", backend.gpu().ordinal),
        }
    }

    /// Name for messages and recipes.
    pub fn name(&self) -> String {
        match self {
            AnyBackend::Cpu(backend) => backend.name(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => backend.name(),
        }
    }

    /// What to compute in where nobody said so. A GPU is many times faster in bf16.
    pub fn suitable_dtype(&self, model: &Model) -> DType {
        match self {
            AnyBackend::Cpu(backend) => suitable_dtype(backend.isa(), model),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => DType::BF16,
        }
    }

    /// Whether it makes products of 8-bit floats.
    pub fn has_fp8(&self) -> bool {
        match self {
            AnyBackend::Cpu(_) => false,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => backend.gpu().has_fp8(),
        }
    }

    /// Threads of the processor for work that it does itself.
    pub fn threads(&self) -> usize {
        match self {
            AnyBackend::Cpu(backend) => backend.threads(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Whether 8-bit weights take memory beside their file.
    pub fn copies_integers(&self) -> bool {
        match self {
            AnyBackend::Cpu(backend) => backend.copies_integers(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => false,
        }
    }

    /// Bytes that a request may need before it is refused.
    pub fn memory_limit(&self) -> Option<u64> {
        match self {
            AnyBackend::Cpu(_) => machine::memory_limit(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => self.vram(),
        }
    }

    /// Bytes of a GPU's memory that may be taken; `None` where the CPU computes.
    pub fn vram(&self) -> Option<u64> {
        match self {
            AnyBackend::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => backend.memory_free().ok().map(|bytes| bytes as u64),
        }
    }
}

/// bf16 where the machine multiplies it as it is and the weights have no more digits than that; else f32.
fn suitable_dtype(isa: kiln_cpu::Isa, model: &Model) -> DType {
    // Weights that can't be opened are refused when they are loaded, with all that is to be said about them.
    let short = model.transformer.weights().is_ok_and(|weights| {
        let (short, long): (Vec<_>, Vec<_>) =
            weights.dtypes().into_iter().partition(|(dtype, _)| dtype.size() <= 2);
        let count = |dtypes: Vec<(DType, u64)>| dtypes.iter().map(|(_, n)| n).sum::<u64>();
        // Made-up weights have 16 bits.
        count(short) > count(long) || weights.synthetic_bytes().is_some()
    });
    if isa.multiplies_bf16() && short { DType::BF16 } else { DType::F32 }
}

/// Kernels are kept beside what else is kept.
#[cfg(feature = "cuda")]
fn cuda_options(device: usize, settings: &Settings) -> kiln_cuda::Options {
    use crate::settings::Graphs;
    let memory_limit = settings.vram_limit.and_then(|bytes| usize::try_from(bytes).ok());
    let graphs = match settings.graphs {
        Graphs::Auto => kiln_cuda::Graphs::Auto,
        Graphs::Always => kiln_cuda::Graphs::Always,
        Graphs::Never => kiln_cuda::Graphs::Never,
    };
    kiln_cuda::Options {
        device,
        cache: settings.kernel_cache.clone(),
        memory_limit,
        graphs,
        ..Default::default()
    }
}

/// The GPU of this number.
#[cfg(feature = "cuda")]
fn cuda(number: usize, settings: &Settings) -> Result<AnyBackend> {
    kiln_cuda::CudaBackend::new(&cuda_options(number, settings))
        .map(|backend| AnyBackend::Cuda(Box::new(backend)))
        .map_err(|e| Error::Device {
            what: format!("cuda:{number} can't be used: {e}"),
            hint: Some(USE_THE_CPU.into()),
        })
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize, _: &Settings) -> Result<AnyBackend> {
    let what = "this build of Kiln has no CUDA backend".into();
    Err(Error::Device { what, hint: Some(USE_THE_CPU.into()) })
}

/// What an image takes beside the weights, roughly.
#[cfg(feature = "cuda")]
const GPU_WORK: u64 = 2 << 30;

#[cfg(feature = "cuda")]
fn find_gpu(weights: u64, settings: &Settings) -> (Option<AnyBackend>, Option<String>) {
    use crate::memory::Gib;
    // Whoever names a limit knows that not everything may fit.
    let needed = if settings.vram_limit.is_some() { 0 } else { weights.saturating_add(GPU_WORK) };
    let free = |backend: &kiln_cuda::CudaBackend| backend.memory_free().unwrap_or(0) as u64;
    match kiln_cuda::CudaBackend::new(&cuda_options(0, settings)) {
        Ok(backend) if free(&backend) >= needed => (Some(AnyBackend::Cuda(Box::new(backend))), None),
        Ok(backend) => {
            let (needed, free, name) = (Gib(needed), Gib(free(&backend)), &backend.gpu().name);
            let why = format!(
                "the GPU is not used: this model takes about {needed}, and {name} has {free} free; with --device cuda, \
                 what doesn't fit is brought in as it is used"
            );
            (None, Some(why))
        }
        // A machine without an NVIDIA GPU has nothing to be told.
        Err(kiln_cuda::Error::NoDevice { .. }) => (None, None),
        Err(kiln_cuda::Error::Missing { library, .. }) if library == kiln_cuda::Wanted::Driver.name() => {
            (None, None)
        }
        Err(e) => (None, Some(format!("the GPU is not used: {e}"))),
    }
}

#[cfg(not(feature = "cuda"))]
fn find_gpu(_: u64, _: &Settings) -> (Option<AnyBackend>, Option<String>) {
    (None, None)
}

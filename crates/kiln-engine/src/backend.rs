//! Chooses the backend: the only file that knows all of them.

use kiln_cpu::CpuBackend;
use kiln_ops::{Backend, OpTimer, TimedBackend, TrainingBackend};
use kiln_tensor::DType;
use kiln_weights::WeightSource;

use crate::counters::Counters;
use crate::error::{Error, ErrorKind, Field, Hint, Result};
use crate::hint;
use crate::machine;
use crate::model::Model;
use crate::settings::{Device, GpuApi, Precision, Settings};

fn use_the_cpu() -> Hint {
    hint!["to compute on the CPU, use ", Field::Device.to("cpu"), " or leave out ", Field::Device]
}

// Operations can always be timed: models and training are then compiled once for each backend, and not again with timing.
type Cpu = TimedBackend<CpuBackend>;
#[cfg(feature = "cuda")]
type Cuda = TimedBackend<kiln_cuda::CudaBackend>;
#[cfg(feature = "wgpu")]
type Wgpu = TimedBackend<kiln_wgpu::WgpuBackend>;

/// One of the backends. Clones share its device.
#[derive(Clone)]
pub(crate) enum AnyBackend {
    Cpu(Cpu),
    #[cfg(feature = "cuda")]
    Cuda(Box<Cuda>),
    #[cfg(feature = "wgpu")]
    Wgpu(Box<Wgpu>),
}

/// Code that is generic over the backend.
pub trait BackendVisitor {
    /// What it returns.
    type Output;

    /// Runs on this backend.
    fn visit<B: Backend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Self::Output;
}

/// Code that trains, generic over the backend.
pub trait TrainingVisitor {
    /// What it returns.
    type Output;

    /// Runs on this backend.
    fn visit<B: TrainingBackend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Self::Output;
}

/// Code that needs no more than a [`Backend`].
struct OnAnyBackend<V>(V);

impl<V: BackendVisitor> TrainingVisitor for OnAnyBackend<V> {
    type Output = V::Output;

    fn visit<B: TrainingBackend + 'static>(self, backend: B, device: DeviceInfo<B>) -> Self::Output {
        self.0.visit(backend, device)
    }
}

/// Device queries that are not part of [`Backend`].
pub(crate) struct DeviceHooks<B> {
    /// Returns the bytes available for activations.
    pub free_memory: fn(&B) -> Option<u64>,
    /// Returns counters for benchmarks.
    pub counters: fn(&B) -> Counters,
    /// Returns unused memory to the device.
    pub release_memory: fn(&B),
    /// Times operations; paused at first.
    pub timer: fn(&B) -> &OpTimer,
    /// Returns what the user should know of the work so far, each once.
    pub take_notes: fn(&B) -> Vec<String>,
    /// Returns the backend without its type.
    pub any: fn(&B) -> AnyBackend,
}

/// Properties of a device.
pub struct DeviceInfo<B> {
    /// Its name, as `--device` takes it.
    pub device: String,
    /// Whether operations return before they are done.
    pub is_asynchronous: bool,
    /// The instruction set; `None` on a GPU.
    pub isa: Option<kiln_cpu::Isa>,
    /// CPU threads for work on the host.
    pub threads: usize,
    /// Available GPU memory in bytes; `None` on the CPU.
    pub vram: Option<u64>,
    /// Whether it has fp8 matmuls.
    pub has_fp8: bool,
    /// Whether it has nvfp4 matmuls.
    pub has_nvfp4: bool,
    pub(crate) hooks: DeviceHooks<B>,
}

impl<B> DeviceInfo<B> {
    /// Returns counters for benchmarks.
    pub fn counters(&self, backend: &B) -> Counters {
        (self.hooks.counters)(backend)
    }

    /// Returns the timer of the backend's operations, which is paused at first.
    pub fn timer<'b>(&self, backend: &'b B) -> &'b OpTimer {
        (self.hooks.timer)(backend)
    }

    /// Returns the precision for this model if none is given.
    pub fn default_precision(&self, model: &Model) -> Precision {
        match self.isa.map(|isa| cpu_default_dtype(isa, model.transformer.weights().ok())) {
            Some(DType::F32) => Precision::F32,
            _ => Precision::Bf16,
        }
    }

    /// Returns what the user should know of the work so far: why some of it is slow. Each note is returned once in a process.
    pub fn take_notes(&self, backend: &B) -> Vec<String> {
        (self.hooks.take_notes)(backend)
    }

    /// Returns unused memory to the device, and restarts the peak counter.
    pub fn release_memory(&self, backend: &B) {
        (self.hooks.release_memory)(backend);
    }
}

/// Trains on the backend that `settings` name; `auto` is the CPU.
pub fn with_training_backend<V: TrainingVisitor>(settings: &Settings, visitor: V) -> Result<V::Output> {
    if let Device::Wgpu(..) = settings.device {
        let what = format!("training is not available on {}", settings.device);
        return Err(Error::refused(ErrorKind::Device, what).with_hint(hint![
            "train with ",
            Field::Device.to("cuda"),
            " or ",
            Field::Device.to("cpu")
        ]));
    }
    Ok(AnyBackend::new(settings)?.accept_training(visitor))
}

#[cfg(feature = "cuda")]
fn cuda_info(backend: &Cuda, device: String, threads: usize) -> DeviceInfo<Cuda> {
    let hooks = DeviceHooks {
        free_memory: |b: &Cuda| b.inner().memory_free().ok().map(|bytes| bytes as u64),
        counters: |b: &Cuda| Counters {
            graph_replays: b.inner().graph_replays(),
            peak_memory: b.inner().memory_peak() as u64,
        },
        release_memory: |b: &Cuda| b.inner().release_memory(),
        timer: Cuda::timer,
        take_notes: |b: &Cuda| b.inner().take_notes(),
        any: |b: &Cuda| AnyBackend::Cuda(Box::new(b.clone())),
    };
    let backend = backend.inner();
    let vram = backend.memory_free().ok().map(|bytes| bytes as u64);
    let (has_fp8, has_nvfp4) = (backend.gpu().has_fp8(), backend.has_nvfp4());
    DeviceInfo { device, is_asynchronous: true, isa: None, threads, vram, has_fp8, has_nvfp4, hooks }
}

#[cfg(feature = "wgpu")]
fn wgpu_info(backend: &Wgpu, device: String, threads: usize) -> DeviceInfo<Wgpu> {
    let hooks = DeviceHooks {
        free_memory: |b: &Wgpu| Some(wgpu_memory(b)),
        counters: |b: &Wgpu| Counters { graph_replays: 0, peak_memory: b.inner().memory_peak() as u64 },
        release_memory: |b: &Wgpu| b.inner().release_memory(),
        timer: Wgpu::timer,
        take_notes: |_| Vec::new(),
        any: |b: &Wgpu| AnyBackend::Wgpu(Box::new(b.clone())),
    };
    let vram = Some(wgpu_memory(backend));
    let (has_fp8, has_nvfp4) = (false, false);
    DeviceInfo { device, is_asynchronous: true, isa: None, threads, vram, has_fp8, has_nvfp4, hooks }
}

/// Bytes that an adapter can still hold: what a limit allows, the machine's memory where the GPU shares it, and otherwise more than
/// any has. No interface tells how much memory of a GPU is free: a model that does not fit is an error that names the limit.
#[cfg(feature = "wgpu")]
fn wgpu_memory(backend: &Wgpu) -> u64 {
    use kiln_wgpu::AdapterKind;
    const UNKNOWN: u64 = 1 << 40;
    let backend = backend.inner();
    let shares = matches!(backend.adapter().kind, AdapterKind::Integrated | AdapterKind::Cpu);
    let machine = if shares { machine::memory_limit() } else { None };
    backend.memory_free().map(|bytes| bytes as u64).or(machine).unwrap_or(UNKNOWN)
}

fn cpu_info(backend: &Cpu, device: String, threads: usize) -> DeviceInfo<Cpu> {
    let hooks = DeviceHooks {
        free_memory: |_| machine::memory_limit(),
        counters: |_| Counters::default(),
        release_memory: |_| {},
        timer: Cpu::timer,
        take_notes: |_| Vec::new(),
        any: |b: &Cpu| AnyBackend::Cpu(b.clone()),
    };
    let isa = Some(backend.inner().isa());
    let (has_fp8, has_nvfp4) = (false, false);
    DeviceInfo { device, is_asynchronous: false, isa, threads, vram: None, has_fp8, has_nvfp4, hooks }
}

/// Runs `visitor` on the backend that `settings` name; `auto` is the CPU.
pub fn with_backend<V: BackendVisitor>(settings: &Settings, visitor: V) -> Result<V::Output> {
    Ok(AnyBackend::new(settings)?.accept(visitor))
}

impl AnyBackend {
    /// Chooses the backend for a model. `auto` takes an NVIDIA GPU if the model runs with its free bytes of memory, as `fits`
    /// says with the reason if not, or any GPU if a memory limit is set. The note says why a GPU or a limit is not used.
    pub fn for_model(
        settings: &Settings,
        fits: impl Fn(u64) -> Result<(), String>,
    ) -> Result<(AnyBackend, Option<String>)> {
        let (gpu, note) = match settings.device {
            Device::Auto => find_cuda(&fits, settings),
            _ => (None, None),
        };
        let chosen = gpu.map_or_else(|| AnyBackend::new(settings), Ok)?;
        let unused_limit = settings.vram_limit.is_some() && chosen.vram().is_none();
        let note = note.or_else(|| unused_limit.then(|| "--vram-limit has no effect on the CPU".into()));
        Ok((chosen, note))
    }

    /// Creates the backend for the device of `settings`; `auto` is the CPU.
    fn new(settings: &Settings) -> Result<AnyBackend> {
        match settings.device {
            Device::Cpu | Device::Auto => {
                let options = kiln_cpu::CpuOptions { isa: settings.isa, threads: settings.threads };
                Ok(AnyBackend::Cpu(TimedBackend::paused(CpuBackend::new(options)?)))
            }
            Device::Cuda(number) => cuda(number, settings),
            Device::Wgpu(api, number) => wgpu(api, number, settings),
        }
    }

    /// Runs `visitor` on the backend.
    pub fn accept<V: BackendVisitor>(self, visitor: V) -> V::Output {
        self.accept_training(OnAnyBackend(visitor))
    }

    /// Runs `visitor`, which trains, on the backend.
    pub fn accept_training<V: TrainingVisitor>(self, visitor: V) -> V::Output {
        let (device, threads) = (self.device(), self.threads());
        match self {
            AnyBackend::Cpu(backend) => {
                let info = cpu_info(&backend, device, threads);
                visitor.visit(backend, info)
            }
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => {
                let info = cuda_info(&backend, device, threads);
                visitor.visit(*backend, info)
            }
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(backend) => {
                let info = wgpu_info(&backend, device, threads);
                visitor.visit(*backend, info)
            }
        }
    }

    /// Returns the device's name, as `--device` takes it.
    pub fn device(&self) -> String {
        match self {
            AnyBackend::Cpu(_) => "cpu".into(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => format!("cuda:{}", backend.inner().gpu().ordinal),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(backend) => format!("wgpu:{}", backend.inner().adapter().number),
        }
    }

    /// Returns the backend's name for messages and recipes.
    pub fn name(&self) -> String {
        match self {
            AnyBackend::Cpu(backend) => backend.name(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => backend.name(),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(backend) => backend.name(),
        }
    }

    /// Returns the dtype for these weights, if they can be opened and no precision is given. A GPU is many times faster in
    /// bf16.
    pub fn default_dtype(&self, weights: Option<&WeightSource>) -> DType {
        match self {
            AnyBackend::Cpu(backend) => cpu_default_dtype(backend.inner().isa(), weights),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => DType::BF16,
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => DType::BF16,
        }
    }

    /// Whether it has fp8 matmuls.
    pub fn has_fp8(&self) -> bool {
        match self {
            AnyBackend::Cpu(_) => false,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => backend.inner().gpu().has_fp8(),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => false,
        }
    }

    /// Whether it has nvfp4 matmuls.
    pub fn has_nvfp4(&self) -> bool {
        match self {
            AnyBackend::Cpu(_) => false,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => backend.inner().has_nvfp4(),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => false,
        }
    }

    /// Returns the CPU threads for work on the host.
    pub fn threads(&self) -> usize {
        match self {
            AnyBackend::Cpu(backend) => backend.inner().threads(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => std::thread::available_parallelism().map_or(1, usize::from),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Whether int8 weights are copied, so that they take memory in addition to their mapped file.
    pub fn copies_int8(&self) -> bool {
        match self {
            AnyBackend::Cpu(backend) => backend.inner().repacks_int8(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => false,
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => false,
        }
    }

    /// Returns the bytes available for a request; one that needs more is refused.
    pub fn memory_limit(&self) -> Option<u64> {
        match self {
            AnyBackend::Cpu(_) => machine::memory_limit(),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => self.vram(),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => self.vram(),
        }
    }

    /// Returns the available GPU memory in bytes; `None` on the CPU.
    pub fn vram(&self) -> Option<u64> {
        match self {
            AnyBackend::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(backend) => backend.inner().memory_free().ok().map(|bytes| bytes as u64),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(backend) => Some(wgpu_memory(backend)),
        }
    }
}

/// Returns bf16 if the CPU multiplies bf16 natively and most weights have at most 16 bits, else f32.
fn cpu_default_dtype(isa: kiln_cpu::Isa, weights: Option<&WeightSource>) -> DType {
    // Weights that can't be opened are reported when they are loaded.
    let short = weights.is_some_and(|weights| {
        let (short, long): (Vec<_>, Vec<_>) =
            weights.dtypes().into_iter().partition(|(dtype, _)| dtype.size() <= 2);
        let count = |dtypes: Vec<(DType, u64)>| dtypes.iter().map(|(_, n)| n).sum::<u64>();
        // Synthetic weights have 16 bits.
        count(short) > count(long) || weights.synthetic_bytes().is_some()
    });
    if isa.multiplies_bf16() && short { DType::BF16 } else { DType::F32 }
}

#[cfg(feature = "cuda")]
fn cuda_options(device: usize, settings: &Settings) -> kiln_cuda::Options {
    use crate::settings::{CudaGraphs, CudaKernels};
    let memory_limit = settings.vram_limit.and_then(|bytes| usize::try_from(bytes).ok());
    let graphs = match settings.graphs {
        CudaGraphs::Auto => kiln_cuda::Graphs::Auto,
        CudaGraphs::Always => kiln_cuda::Graphs::Always,
        CudaGraphs::Never => kiln_cuda::Graphs::Never,
    };
    kiln_cuda::Options {
        device,
        cache: settings.kernel_cache.clone(),
        memory_limit,
        graphs,
        kernels: settings.cuda_kernels.map(CudaKernels::capability),
        ..Default::default()
    }
}

/// Creates the backend for the GPU with this number.
#[cfg(feature = "cuda")]
fn cuda(number: usize, settings: &Settings) -> Result<AnyBackend> {
    kiln_cuda::CudaBackend::new(&cuda_options(number, settings))
        .map(|backend| AnyBackend::Cuda(Box::new(TimedBackend::paused(backend))))
        .map_err(|e| {
            let what = format!("can't use cuda:{number}: {e}");
            Error::refused(ErrorKind::Device, what).with_hint(use_the_cpu())
        })
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize, _: &Settings) -> Result<AnyBackend> {
    let why = kiln_base::NO_NVIDIA.map_or(String::new(), |why| format!(": {why}"));
    let what = format!("this build of Kiln has no CUDA backend{why}");
    Err(Error::refused(ErrorKind::Device, what).with_hint(use_the_cpu()))
}

/// Creates the backend for the adapter with this number.
#[cfg(feature = "wgpu")]
fn wgpu(api: Option<GpuApi>, number: usize, settings: &Settings) -> Result<AnyBackend> {
    let api = api.map(|api| match api {
        GpuApi::Vulkan => kiln_wgpu::Api::Vulkan,
        GpuApi::Metal => kiln_wgpu::Api::Metal,
        GpuApi::Dx12 => kiln_wgpu::Api::Dx12,
    });
    let memory_limit = settings.vram_limit.and_then(|bytes| usize::try_from(bytes).ok());
    let options = kiln_wgpu::Options { api, number, memory_limit, ..Default::default() };
    kiln_wgpu::WgpuBackend::new(&options)
        .map(|backend| AnyBackend::Wgpu(Box::new(TimedBackend::paused(backend))))
        .map_err(|e| {
            let what = format!("can't use {}: {e}", settings.device);
            Error::refused(ErrorKind::Device, what).with_hint(use_the_cpu())
        })
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: Option<GpuApi>, _: usize, _: &Settings) -> Result<AnyBackend> {
    let what = "this build of Kiln has no backend for Vulkan, Metal and DirectX";
    Err(Error::refused(ErrorKind::Device, what).with_hint(use_the_cpu()))
}

/// Returns the first NVIDIA GPU if the model runs with its free memory; else a note that says why not, if there is one.
#[cfg(feature = "cuda")]
fn find_cuda(
    fits: impl Fn(u64) -> Result<(), String>,
    settings: &Settings,
) -> (Option<AnyBackend>, Option<String>) {
    match kiln_cuda::CudaBackend::new(&cuda_options(0, settings)) {
        Ok(backend) => {
            let free = backend.memory_free().unwrap_or(0) as u64;
            // A limit that is too small is an error of the plan.
            match fits(free) {
                Err(why) if settings.vram_limit.is_none() => {
                    (None, Some(format!("the GPU is not used: {why} ({})", backend.gpu().name)))
                }
                _ => (Some(AnyBackend::Cuda(Box::new(TimedBackend::paused(backend)))), None),
            }
        }
        // No note on a machine without an NVIDIA GPU.
        Err(kiln_cuda::Error::NoDevice { .. }) => (None, None),
        Err(kiln_cuda::Error::Missing { library, .. })
            if library == kiln_cuda::CudaLibrary::Driver.name() =>
        {
            (None, None)
        }
        Err(e) => (None, Some(format!("the GPU is not used: {e}"))),
    }
}

#[cfg(not(feature = "cuda"))]
fn find_cuda(_: impl Fn(u64) -> Result<(), String>, _: &Settings) -> (Option<AnyBackend>, Option<String>) {
    (None, None)
}

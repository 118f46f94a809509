//! The context that every operation receives: a queue and the state shared by all queues of a GPU.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::flags::BlockFlags;
use crate::gemm::cublaslt::CublasLtGemm;
use crate::gemm::fast::FastGemm;
use crate::gemm::nvfp4::Nvfp4Gemm;
use crate::gemm::shape::GemmShape;
use crate::kernels::{Kernel, Parameters};
use crate::later::Later;
use crate::options::{Graphs, Options};
use crate::queue::{DeviceBuffer, Queue, Recording};
use crate::slow::SlowProducts;
use crate::streamer::WeightStreamer;

/// A queue and the state shared by all queues of its GPU.
#[derive(Clone)]
pub(crate) struct Context {
    queue: Queue,
    shared: Arc<SharedState>,
}

/// State created once per GPU, in addition to the [`Device`].
pub(crate) struct SharedState {
    pub gemm: FastGemm,
    pub nvfp4: Nvfp4Gemm,
    pub flags: BlockFlags,
    /// Weights in host memory that are copied to the GPU on use.
    pub streamer: Arc<WeightStreamer>,
    /// Whether repeated work is captured as CUDA graphs.
    pub graphs: Graphs,
    /// Products that no fast kernel takes.
    pub slow: SlowProducts,
    /// Number of graph replays so far.
    pub graph_replays: AtomicUsize,
}

impl Deref for Context {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl Context {
    /// Opens a GPU.
    pub fn new(options: &Options) -> Result<Context> {
        let device = Arc::new(Device::new(options)?);
        let cublaslt = if options.disable_cublaslt {
            Later::ready(Err(Error::Missing { library: "cuBLASLt", install: "it is disabled" }))
        } else {
            let device = Arc::clone(&device);
            Later::start(move || {
                let cublaslt = CublasLtGemm::new(&device)?;
                // What fails here fails at the first product, too, and is reported there.
                let _ = cublaslt.warm_up();
                Ok(cublaslt)
            })
        };
        // Graphs keep their memory; a memory limit means that it is scarce.
        let graphs = match options.graphs {
            Graphs::Auto if options.memory_limit.is_some() => Graphs::Never,
            graphs => graphs,
        };
        let streamer = WeightStreamer::new(&device);
        let (flags, graph_replays) = (BlockFlags::default(), AtomicUsize::new(0));
        let (gemm, nvfp4, slow) = (FastGemm::new(cublaslt), Nvfp4Gemm::new(), SlowProducts::default());
        let shared = SharedState { gemm, nvfp4, flags, streamer, graphs, slow, graph_replays };
        Ok(Context { queue: Queue::immediate(device), shared: Arc::new(shared) })
    }

    /// Returns a context whose work is recorded, not executed.
    pub fn begin_recording(&self) -> Result<(Context, Arc<Recording>)> {
        let (queue, recording) = self.queue.begin_recording()?;
        Ok((Context { queue, shared: Arc::clone(&self.shared) }, recording))
    }

    /// State shared by all queues.
    pub fn shared(&self) -> &SharedState {
        &self.shared
    }

    /// Notes a product that is computed by a kernel of last resort.
    pub fn note_slow_product(&self, shape: &GemmShape) {
        self.shared.slow.add(shape, self.shared.gemm.cublaslt().is_ok());
    }

    /// Name for messages.
    pub fn name(&self) -> String {
        format!("cuda:{} ({})", self.gpu().ordinal, self.gpu().name)
    }

    /// What the last bits of results depend on: the GPU, the matmul library and the kernels.
    pub fn numerics(&self) -> String {
        let products = self
            .shared
            .gemm
            .cublaslt()
            .as_ref()
            .map_or_else(|_| "own products".into(), CublasLtGemm::version_text);
        format!("cuda ({}, {products}, {})", self.gpu().name, self.queue.images().numerics())
    }

    /// Name and memory use, for out-of-memory messages.
    fn memory_summary(&self) -> String {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let memory = self.queue.device_memory();
        format!(
            "{}, {:.1} GiB in total, {:.1} held by Kiln, {:.1} available",
            self.name(),
            gib(self.gpu().memory),
            gib(memory.held() as u64),
            gib(memory.available().unwrap_or(0) as u64)
        )
    }

    /// Converts a device error into an operation's error.
    pub fn check<T>(&self, result: Result<T>) -> kiln_ops::Result<T> {
        result.map_err(|e| kiln_ops::Error::Device { backend: self.name(), what: e.to_string() })
    }

    /// Allocates device memory.
    pub fn allocate(&self, bytes: usize) -> kiln_ops::Result<DeviceBuffer> {
        self.check(self.queue.allocate(bytes))?.ok_or_else(|| self.out_of_memory(bytes))
    }

    /// The error for a failed allocation of `bytes` bytes.
    pub fn out_of_memory(&self, bytes: usize) -> kiln_ops::Error {
        kiln_ops::Error::Memory { backend: self.memory_summary(), bytes }
    }

    /// [`Kernel::launch`].
    pub fn launch<P: Parameters>(
        &self,
        kernel: Kernel<P>,
        grid: [usize; 2],
        threads: usize,
        shared: usize,
        parameters: &P,
    ) -> kiln_ops::Result<()> {
        self.check(kernel.launch(&self.queue, grid, threads, shared, parameters))
    }
}

/// Converts a size to the kernels' `int`.
pub(crate) fn int(op: &'static str, n: usize) -> kiln_ops::Result<i32> {
    i32::try_from(n).map_err(|_| kiln_ops::Error::Arguments {
        op,
        what: format!("a size of {n} exceeds the 32-bit range of the CUDA kernels"),
    })
}

//! What every operation is handed.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kiln_ops::Error;

use crate::device::Device;
use crate::error::Result;
use crate::flags::Flags;
use crate::gemm::lt::Lt;
use crate::kernels::{Kernel, Parameters};
use crate::options::{Graphs, Options};
use crate::queue::{Block, Queue, Recording};
use crate::streamer::Streamer;

/// A queue, and what operations share whichever queue they go to.
#[derive(Clone)]
pub(crate) struct Context {
    queue: Queue,
    shared: Arc<Shared>,
}

/// What is made once for a GPU, beside the device itself.
pub(crate) struct Shared {
    /// cuBLASLt, or why products are made without it.
    pub lt: Result<Lt>,
    pub flags: Flags,
    /// The weights that are brought in when they are used.
    pub streamer: Arc<Streamer>,
    /// Whether work that is asked for again and again is recorded.
    pub graphs: Graphs,
    /// How many times recorded work was replayed.
    pub replayed: AtomicUsize,
}

impl Deref for Context {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl Context {
    /// Takes a GPU.
    pub fn new(options: &Options) -> Result<Context> {
        let device = Arc::new(Device::new(options)?);
        let lt = if options.own_products {
            Err(crate::error::Error::Missing { library: "cuBLASLt", install: "it was not asked for" })
        } else {
            Lt::new(&device)
        };
        // What is recorded keeps its memory, and a limit says that there is little.
        let graphs = match options.graphs {
            Graphs::Auto if options.memory_limit.is_some() => Graphs::Never,
            graphs => graphs,
        };
        let streamer = Streamer::new(&device);
        let (flags, replayed) = (Flags::default(), AtomicUsize::new(0));
        let shared = Shared { lt, flags, streamer, graphs, replayed };
        Ok(Context { queue: Queue::live(device), shared: Arc::new(shared) })
    }

    /// The same for work that is only written down.
    pub fn record(&self) -> Result<(Context, Arc<Recording>)> {
        let (queue, recording) = self.queue.record()?;
        Ok((Context { queue, shared: Arc::clone(&self.shared) }, recording))
    }

    /// What all queues share.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Name for messages.
    pub fn name(&self) -> String {
        format!("cuda:{} ({})", self.gpu().ordinal, self.gpu().name)
    }

    /// What the last bits depend on: the GPU, and who multiplies.
    pub fn numerics(&self) -> String {
        let products = self.shared.lt.as_ref().map_or_else(|_| "own products".into(), Lt::version_text);
        format!("cuda ({}, {products})", self.gpu().name)
    }

    /// Name for messages about memory: what there is, and who has it.
    fn state(&self) -> String {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let memory = self.queue.device_memory();
        format!(
            "{}, of whose {:.1} GiB Kiln holds {:.1} and may take {:.1} more",
            self.name(),
            gib(self.gpu().memory),
            gib(memory.held() as u64),
            gib(memory.free().unwrap_or(0) as u64)
        )
    }

    /// A device's word as an operation's.
    pub fn done<T>(&self, result: Result<T>) -> kiln_ops::Result<T> {
        result.map_err(|e| Error::Device { backend: self.name(), what: e.to_string() })
    }

    /// Memory of the device.
    pub fn block(&self, bytes: usize) -> kiln_ops::Result<Block> {
        self.done(self.queue.memory(bytes))?.ok_or_else(|| self.short_of(bytes))
    }

    /// So many bytes can't be had.
    pub fn short_of(&self, bytes: usize) -> Error {
        Error::Memory { backend: self.state(), bytes }
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
        self.done(kernel.launch(&self.queue, grid, threads, shared, parameters))
    }
}

/// A size as kernels take it.
pub(crate) fn int(op: &'static str, n: usize) -> kiln_ops::Result<i32> {
    i32::try_from(n).map_err(|_| Error::Arguments {
        op,
        what: format!("a size of {n} is more than the GPU's kernels can count"),
    })
}

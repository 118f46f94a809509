//! The backend: each operation is the function of its name in [`ops`].

use std::sync::Arc;

use kiln_base::plural;
use kiln_ops::signatures::*;
use kiln_ops::{Backend, Error, TrainingBackend, backend_methods, training_methods};

use crate::isa::{Isa, Level};
use crate::parallel::Pool;
use crate::{Context, CpuConv, CpuTensor, CpuWeight, ops};

/// See [`Backend::max_batch_rows`]. Measured on two cores with AMX: an int8 model of 384 channels gains from batching up to
/// about this many rows; a large model has more rows than that in a single image and gains nothing.
///
/// Ember in int8, milliseconds per step and image, for 1, 2, 4 and 8 images: 26.5, 16.6, 14.3, 14.9 at 256×256 (320
/// rows each); 39, 33, 36 at 384×384 (640 rows); 63, 75, 72 at 512×512 (1088 rows). Not yet
/// remeasured with the current, faster kernels. A server gains less: text encoding, decoding and PNG are not batched.
const BATCH_ROWS: usize = 1280;

/// The settings of a [`CpuBackend`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// The instruction set; `None` is the fastest this machine has.
    pub isa: Option<Isa>,
    /// The number of threads; `None` or 0 is as many as the machine runs in parallel.
    pub threads: Option<usize>,
}

/// The operations on the CPU, with a thread pool of its own. Clones share the pool.
#[derive(Clone)]
pub struct CpuBackend {
    cx: Context,
}

impl CpuBackend {
    /// Starts the threads; fails if the machine lacks the requested instruction set.
    pub fn new(options: CpuOptions) -> Result<CpuBackend> {
        let isa = options.isa.unwrap_or_else(Isa::best);
        let level = Level::detect(isa).ok_or_else(|| Error::Device {
            backend: "cpu".into(),
            what: format!("this machine has no {isa}; the best it has is {}", Isa::best()),
        })?;
        let pool = Arc::new(Pool::new(options.threads)?);
        Ok(CpuBackend { cx: Context { level, pool, buffers: Arc::default() } })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.cx.level.isa()
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.cx.pool.threads()
    }

    /// Whether int8 weights are repacked when they are loaded, so that they take memory in addition to their mapped file.
    pub fn repacks_int8(&self) -> bool {
        match self.cx.level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx(amx) => amx.has_int8(),
            _ => false,
        }
    }
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// Calls the function of an operation's name.
macro_rules! call {
    ($self:ident, $op:ident($($argument:ident),*)) => { ops::$op(&$self.cx, $($argument),*) };
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = CpuWeight;
    type Conv = CpuConv;
    type GraphCache = ();

    fn name(&self) -> String {
        let threads = self.threads();
        format!("cpu ({}, {})", self.isa(), plural(threads, "thread"))
    }

    fn numerics(&self) -> String {
        format!("cpu ({})", self.isa())
    }

    fn reads_host_weights(&self) -> bool {
        true
    }

    fn max_batch_rows(&self) -> usize {
        BATCH_ROWS
    }

    backend_methods!(required, call);
}

impl TrainingBackend for CpuBackend {
    type Quantized = Quantized8;

    training_methods!(required, call);
}

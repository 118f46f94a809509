//! The CUDA backend: each operation is the launcher of its name in [`ops`].
//!
//! Batching images gains nothing on an H200 (klein 4B, 1024×1024: 114 ms for a step of two images, 57 ms for one), so
//! `max_batch_rows` keeps its default, 0.

use std::sync::atomic::Ordering;

use kiln_ops::signatures::*;
use kiln_ops::{Backend, RunMode, TrainingBackend, backend_methods, training, training_methods};

use crate::context::Context;
use crate::error::{self, Error};
use crate::gemm::nvfp4::Nvfp4Gemm;
use crate::ops::{self, CudaQuantized};
use crate::options::Options;
use crate::probe::Gpu;
use crate::replay::{self, CudaGraphCache};
use crate::tensor::CudaTensor;
use crate::weight::{CudaConv, CudaWeight};

/// The operations on one NVIDIA GPU. Clones share the GPU's stream and memory.
#[derive(Clone)]
pub struct CudaBackend {
    pub(crate) cx: Context,
}

impl CudaBackend {
    /// Loads the libraries and opens the GPU. Returns an error, never panics, if something is missing.
    pub fn new(options: &Options) -> error::Result<CudaBackend> {
        Ok(CudaBackend { cx: Context::new(options)? })
    }

    /// The GPU in use.
    pub fn gpu(&self) -> &Gpu {
        self.cx.gpu()
    }

    /// Whether it multiplies matrices in nvfp4: the GPU does, and there are kernels or a compiler that knows the GPU.
    pub fn has_nvfp4(&self) -> bool {
        self.gpu().has_nvfp4() && self.cx.images().can_get(&Nvfp4Gemm::SOURCE)
    }

    /// Why cuBLASLt is not used; `None` if it is.
    pub fn cublaslt_error(&self) -> Option<&Error> {
        self.cx.shared().gemm.cublaslt().as_ref().err()
    }

    /// Bytes of GPU memory that this backend can still allocate.
    pub fn memory_free(&self) -> Result<usize> {
        self.cx.check(self.cx.device_memory().available())
    }

    /// Bytes of GPU memory that this backend holds.
    pub fn memory_held(&self) -> usize {
        self.cx.device_memory().held()
    }

    /// Maximum of [`CudaBackend::memory_held`] since the last [`CudaBackend::release_memory`].
    pub fn memory_peak(&self) -> usize {
        self.cx.device_memory().peak()
    }

    /// Returns unused memory to the driver and restarts the peak count.
    pub fn release_memory(&self) {
        if let Ok(device) = self.cx.device("cuMemFree") {
            device.memory.release();
        }
    }

    /// What the user should know of the work so far: why some of it is slow. Each note is returned once in a process.
    pub fn take_notes(&self) -> Vec<String> {
        self.cx.shared().slow.take()
    }

    /// Number of CUDA graph replays so far.
    pub fn graph_replays(&self) -> usize {
        self.cx.shared().graph_replays.load(Ordering::Relaxed)
    }

    /// Waits for all work submitted so far.
    pub fn wait(&self) -> Result<()> {
        self.cx.check(self.cx.wait())
    }

    /// Runs `work` and returns its time on the GPU, in milliseconds.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        let mut failed = None;
        let time = self.cx.time(|| {
            failed = work().err();
            Ok(())
        });
        match failed {
            Some(e) => Err(e),
            None => self.cx.check(time),
        }
    }
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// Calls the launcher of an operation's name.
macro_rules! call {
    // The kernel does not take all sizes.
    ($self:ident, low_rank_backward($($argument:ident),*)) => {
        match ops::fused_low_rank_backward(&$self.cx, $($argument),*)? {
            Some(gradients) => Ok(gradients),
            None => training::low_rank_backward($self, $($argument),*),
        }
    };
    ($self:ident, $op:ident($($argument:ident),*)) => { ops::$op(&$self.cx, $($argument),*) };
}

impl Backend for CudaBackend {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Conv = CudaConv;
    type GraphCache = CudaGraphCache;

    fn name(&self) -> String {
        self.cx.name()
    }

    fn numerics(&self) -> String {
        self.cx.numerics()
    }

    fn replay<E: From<kiln_ops::Error>>(
        &self,
        replays: &CudaGraphCache,
        key: &[usize],
        inputs: &[&CudaTensor],
        mut work: impl FnMut(&Self, RunMode, &[&CudaTensor]) -> Result<CudaTensor, E>,
    ) -> Result<CudaTensor, E> {
        replay::replay(&self.cx, replays, key, inputs, |cx, run, inputs| {
            work(&CudaBackend { cx: cx.clone() }, run, inputs)
        })
    }

    backend_methods!(required, call);
    backend_methods!(provided, call);
}

impl TrainingBackend for CudaBackend {
    type Quantized = CudaQuantized;

    training_methods!(required, call);
    training_methods!(provided, call);
}

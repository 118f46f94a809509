//! The operations of [`kiln_ops::Backend`] on NVIDIA GPUs.
//!
//! Nothing of CUDA is needed to build this crate or to start a program that uses it: the driver, the compiler of kernels
//! (NVRTC) and cuBLASLt are looked for at run time, and [`probe`] says what was found. The kernels are part of the
//! program as source text; they are compiled for the GPU at hand when it is first used, and kept on disk.
//!
//! ```no_run
//! use kiln_cuda::{CudaBackend, Options};
//! use kiln_ops::Backend;
//! use kiln_tensor::{DType, HostTensor, LinearParts};
//!
//! let b = CudaBackend::new(&Options::default())?;
//! let weight = HostTensor::from_f32([1, 2], vec![2.0, 3.0])?;
//! let w = b.weight(LinearParts::dense(vec![weight])?)?;
//! let x = b.upload(&HostTensor::from_f32([1, 2], vec![10.0, 1.0])?, DType::F32)?;
//! assert_eq!(b.download(&b.linear(&x, &w)?)?.to_f32()?[0], 23.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All work of one backend goes to one stream, in the order of the calls; only [`kiln_ops::Backend::download`] waits.

mod arena;
mod backend;
mod cache;
mod compile;
mod device;
mod error;
mod find;
mod flags;
mod gemm;
mod map;
mod ops;
mod pinned;
mod probe;
mod replay;
mod sources;
mod staging;
mod stream;
mod sys;
mod tensor;
mod weight;

pub use backend::{CudaBackend, Graphs, Options};
pub use compile::Compiler;
pub use error::{Error, Result};
pub use find::Wanted;
pub use probe::{Found, Gpu, Library, Probe, probe};
pub use replay::CudaReplays;
pub use sources::{SOURCES, Source, Target};
pub use tensor::CudaTensor;
pub use weight::{CudaConv, CudaWeight};

use std::sync::Arc;

use device::{Block, Device};

/// What every operation needs to run.
#[derive(Clone)]
pub(crate) struct Context {
    pub device: Arc<Device>,
}

impl Context {
    /// Name for messages.
    pub fn name(&self) -> String {
        format!("cuda:{} ({})", self.device.gpu.ordinal, self.device.gpu.name)
    }

    /// What the last bits depend on: the GPU, and who multiplies.
    pub fn numerics(&self) -> String {
        let products = self.device.lt.as_ref().map_or_else(|_| "own products".into(), |lt| lt.version_text());
        format!("cuda ({}, {products})", self.device.gpu.name)
    }

    /// Name for messages about memory: what there is, and who has it.
    fn state(&self) -> String {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let free = self.device.free().unwrap_or(0);
        format!(
            "{}, of whose {:.1} GiB Kiln holds {:.1} and may take {:.1} more",
            self.name(),
            gib(self.device.gpu.memory),
            gib(self.device.held() as u64),
            gib(free as u64)
        )
    }

    /// A device's word as an operation's.
    pub fn done<T>(&self, result: Result<T>) -> kiln_ops::Result<T> {
        result.map_err(|e| kiln_ops::Error::Device { backend: self.name(), what: e.to_string() })
    }

    /// Memory of the device.
    pub fn block(&self, bytes: usize) -> kiln_ops::Result<Block> {
        self.done(self.device.memory(bytes))?.ok_or_else(|| self.short_of(bytes))
    }

    /// So many bytes can't be had.
    pub fn short_of(&self, bytes: usize) -> kiln_ops::Error {
        kiln_ops::Error::Memory { backend: self.state(), bytes }
    }
}

/// A size as kernels take it.
pub(crate) fn int(op: &'static str, n: usize) -> kiln_ops::Result<i32> {
    i32::try_from(n).map_err(|_| kiln_ops::Error::Arguments {
        op,
        what: format!("a size of {n} is more than the GPU's kernels can count"),
    })
}

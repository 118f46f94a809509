//! The wgpu backend: each operation is the launcher of its name in [`ops`].

use kiln_ops::signatures::*;
use kiln_ops::{Backend, Error, TrainingBackend, backend_methods, training_methods};

use crate::context::Context;
use crate::device::Adapter;
use crate::error;
use crate::ops;
use crate::options::Options;
use crate::tensor::WgpuTensor;
use crate::weight::{WgpuConv, WgpuWeight};

/// The operations on one adapter. Clones share the device and its memory.
#[derive(Clone)]
pub struct WgpuBackend {
    cx: Context,
}

impl WgpuBackend {
    /// Opens an adapter. Returns an error, never panics, if there is none or it can't be used.
    pub fn new(options: &Options) -> error::Result<WgpuBackend> {
        Ok(WgpuBackend { cx: Context::new(options)? })
    }

    /// The adapter in use.
    pub fn adapter(&self) -> &Adapter {
        &self.cx.gpu().adapter
    }

    /// Bytes of GPU memory that a limit still allows; `None` without a limit: no interface tells how much is free.
    pub fn memory_free(&self) -> Option<usize> {
        self.cx.memory().available()
    }

    /// Bytes of GPU memory that this backend holds.
    pub fn memory_held(&self) -> usize {
        self.cx.memory().held()
    }

    /// Maximum of [`WgpuBackend::memory_held`] since the last [`WgpuBackend::release_memory`].
    pub fn memory_peak(&self) -> usize {
        self.cx.memory().peak()
    }

    /// Returns unused memory to the driver and restarts the peak count.
    pub fn release_memory(&self) {
        self.cx.memory().release();
    }

    /// Gives up the device, as the driver does when it resets the GPU: every later call is an error. For tests.
    pub fn destroy(&self) {
        self.cx.gpu().faults.lose("it was destroyed".into());
        self.cx.gpu().device.destroy();
    }
}

impl std::fmt::Debug for WgpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// Calls the launcher of an operation's name.
macro_rules! call {
    ($self:ident, $op:ident($($argument:ident),*)) => { ops::$op(&$self.cx, $($argument),*) };
}

impl Backend for WgpuBackend {
    type Tensor = WgpuTensor;
    type Weight = WgpuWeight;
    type Conv = WgpuConv;
    type GraphCache = ();

    fn name(&self) -> String {
        self.cx.name()
    }

    fn numerics(&self) -> String {
        format!("{} {}", self.cx.name(), self.adapter().driver)
    }

    backend_methods!(required, call);

    fn synchronize(&self) -> Result<()> {
        ops::synchronize(&self.cx)
    }

    fn fence(&self) -> Result<Pending<()>> {
        ops::fence(&self.cx)
    }

    fn download_async(&self, x: &WgpuTensor) -> Result<Pending<HostTensor>> {
        ops::download_async(&self.cx, x)
    }

    fn download_bytes_async(&self, x: &WgpuTensor, scale: f32, shift: f32) -> Result<Pending<Vec<u8>>> {
        ops::download_bytes_async(&self.cx, x, scale, shift)
    }
}

/// Refuses an operation of training.
macro_rules! refuse {
    ($self:ident, $op:ident($($argument:ident),*)) => {{
        let _ = ($($argument,)*);
        Err($self.no_training(stringify!($op)))
    }};
}

impl WgpuBackend {
    fn no_training(&self, op: &'static str) -> Error {
        let what =
            format!("training is not available on this device (it would need `{op}`); train on cuda or cpu");
        Error::Device { backend: self.name(), what }
    }
}

/// Training is for CUDA and CPUs: every operation is refused.
impl TrainingBackend for WgpuBackend {
    type Quantized = ();

    training_methods!(required, refuse);
}

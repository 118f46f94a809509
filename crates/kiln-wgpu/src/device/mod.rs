//! One GPU: its adapter, memory and queue of work, and the errors that it reports.

mod adapters;
mod allocator;
mod faults;
mod future;
mod memory;

use std::sync::Arc;

use wgpu::{ExperimentalFeatures, Features, Limits, MemoryHints};

pub use adapters::{Adapter, AdapterKind, adapters};
pub(crate) use faults::{Fault, Faults};
pub(crate) use future::resolve;
pub(crate) use memory::{DeviceBuffer, DeviceMemory};

use crate::error::{Error, Result};
use crate::options::Options;

/// An open adapter.
pub(crate) struct Gpu {
    pub adapter: Adapter,
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub limits: Limits,
    pub faults: Arc<Faults>,
}

impl Gpu {
    /// Opens the adapter that `options` name.
    pub fn open(options: &Options) -> Result<Gpu> {
        let (handle, adapter) = adapters::choose(options)?;
        let limits = if options.minimal { Limits::defaults() } else { handle.limits() };
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("kiln"),
            required_features: Features::empty(),
            required_limits: limits.clone(),
            experimental_features: ExperimentalFeatures::disabled(),
            memory_hints: MemoryHints::MemoryUsage,
            trace: wgpu::Trace::Off,
        };
        let (device, queue) = resolve(handle.request_device(&descriptor))
            .map_err(|e| Error::Open { name: adapter.name.clone(), what: e.to_string() })?;
        let faults = Faults::watch(&device);
        Ok(Gpu { adapter, device, queue, limits, faults })
    }

    /// The most bytes that one kernel can see of a buffer, and that a buffer can have.
    pub fn max_binding(&self) -> usize {
        let bytes = self.limits.max_storage_buffer_binding_size.min(self.limits.max_buffer_size);
        // A whole number of the smallest offsets.
        (usize::try_from(bytes).unwrap_or(usize::MAX) / 256) * 256
    }
}

//! One GPU: its context, the one stream all work goes to, its memory and its kernels. Nothing here knows of operations.

mod arena;
mod event;
mod memory;
mod modules;
mod pinned;
mod primary;
mod staging;
mod stream;

use std::sync::{Arc, Mutex, MutexGuard};

use crate::cache::Cache;
use crate::error::Result;
use crate::options::Options;
use crate::sys::driver::DevicePtr;
pub(crate) use event::Event;
use kiln_base::lock;
pub(crate) use memory::{Allocation, Memory, Pool, Reclaim};
use modules::Modules;
use pinned::Pinned;
pub(crate) use pinned::{Arrival, PinnedMemory};
pub(crate) use primary::Primary;
use staging::{LARGE, Staging};
pub(crate) use stream::Stream;

/// What all work on one GPU shares.
pub(crate) struct Device {
    pub primary: Arc<Primary>,
    pub cache: Arc<Cache>,
    pub stream: Stream,
    pub memory: Arc<Memory>,
    pub modules: Modules,
    pinned: Arc<Pinned>,
    /// Made when a large copy first needs it; `None` where the driver has no such memory.
    staging: Mutex<Option<Option<Staging>>>,
}

impl Device {
    pub fn new(options: &Options) -> Result<Device> {
        let primary = Primary::retain(options.device)?;
        let folder = if options.keep { Cache::usual_folder() } else { None };
        let cache = Arc::new(Cache::at(options.cache.clone().or(folder)));
        let modules = Modules::new(&primary, &cache)?;
        let stream = Stream::new(&primary)?;
        let memory = Memory::new(&primary, options.memory_limit);
        let (pinned, staging) = (Pinned::new(&primary), Mutex::default());
        Ok(Device { primary, cache, stream, memory, modules, pinned, staging })
    }

    /// Copies from the host; the bytes may go away when this returns.
    pub fn upload(&self, bytes: &[u8], to: DevicePtr) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() >= LARGE
            && let Some(staging) = self.staging().as_mut().and_then(Option::as_mut)
        {
            return staging.upload(bytes, to, &self.stream);
        }
        // SAFETY: the caller has a block of that size.
        unsafe { self.stream.copy_to_device(bytes.as_ptr().cast(), to, bytes.len()) }
    }

    /// Copies to the host and waits.
    pub fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() >= LARGE
            && let Some(staging) = self.staging().as_ref().and_then(Option::as_ref)
        {
            return staging.download(from, bytes, &self.stream);
        }
        // SAFETY: the buffer outlives the wait.
        unsafe { self.stream.copy_to_host(from, bytes.as_mut_ptr().cast(), bytes.len())? };
        self.stream.wait()
    }

    /// Copies to the host without waiting.
    pub fn download_later(&self, from: DevicePtr, bytes: usize) -> Result<Arrival> {
        // SAFETY: the caller has a block of that size.
        unsafe { self.pinned.copy(&self.stream, from, bytes) }
    }

    /// Marks the end of the work so far.
    pub fn mark(&self) -> Result<Arrival> {
        // SAFETY: nothing is copied.
        unsafe { self.pinned.copy(&self.stream, 0, 0) }
    }

    /// The way of large copies.
    fn staging(&self) -> MutexGuard<'_, Option<Option<Staging>>> {
        let mut staging = lock(&self.staging);
        staging.get_or_insert_with(|| Staging::new(&self.primary).ok());
        staging
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Before its stream, kernels and buffers go.
        let _ = self.stream.wait();
    }
}

//! One GPU: its context, its stream, its memory and its kernels. Independent of operations.

mod allocator;
mod event;
mod memory;
mod modules;
mod pinned;
mod primary_context;
mod staging;
mod stream;

use std::sync::{Arc, Mutex};

use crate::cache::DiskCache;
use crate::error::Result;
use crate::later::Later;
use crate::options::Options;
use crate::sys::driver::DevicePtr;
pub(crate) use event::Event;
use kiln_base::lock;
pub(crate) use memory::{Allocation, DeviceMemory, Evictable, PrivatePool};
use modules::Modules;
use pinned::PinnedPool;
pub(crate) use pinned::{PendingCopy, PinnedMemory};
pub(crate) use primary_context::PrimaryContext;
use staging::{MIN_STAGED_BYTES, Staging};
pub(crate) use stream::Stream;

/// The resources of one GPU.
pub(crate) struct Device {
    pub primary: Arc<PrimaryContext>,
    pub cache: Arc<DiskCache>,
    pub stream: Stream,
    pub memory: Arc<DeviceMemory>,
    pub modules: Modules,
    pinned: Arc<PinnedPool>,
    /// `None` where pinned memory is not available.
    staging: Later<Option<Mutex<Staging>>>,
}

impl Device {
    pub fn new(options: &Options) -> Result<Device> {
        let primary = PrimaryContext::retain(options)?;
        let folder = if options.use_cache { DiskCache::default_folder() } else { None };
        let cache = Arc::new(DiskCache::new(options.cache.clone().or(folder)));
        let staging = Later::start({
            let primary = Arc::clone(&primary);
            move || Staging::new(&primary).ok().map(Mutex::new)
        });
        let modules = Modules::new(&primary, &cache)?;
        let stream = Stream::new(&primary)?;
        let memory = DeviceMemory::new(&primary, options.memory_limit);
        let pinned = PinnedPool::new(&primary);
        Ok(Device { primary, cache, stream, memory, modules, pinned, staging })
    }

    /// Copies from the host. The bytes may be dropped when this returns.
    pub fn upload(&self, bytes: &[u8], to: DevicePtr) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() >= MIN_STAGED_BYTES
            && let Some(staging) = self.staging.get()
        {
            return lock(staging).upload(bytes, to, &self.stream);
        }
        // SAFETY: the caller has a block of that size.
        unsafe { self.stream.copy_to_device(bytes.as_ptr().cast(), to, bytes.len()) }
    }

    /// Copies to the host and waits.
    pub fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() >= MIN_STAGED_BYTES
            && let Some(staging) = self.staging.get()
        {
            return lock(staging).download(from, bytes, &self.stream);
        }
        // SAFETY: the buffer outlives the wait.
        unsafe { self.stream.copy_to_host(from, bytes.as_mut_ptr().cast(), bytes.len())? };
        self.stream.wait()
    }

    /// Copies to the host without waiting.
    pub fn download_async(&self, from: DevicePtr, bytes: usize) -> Result<PendingCopy> {
        // SAFETY: the caller has a block of that size.
        unsafe { self.pinned.start_copy(&self.stream, from, bytes) }
    }

    /// Marks the end of the work submitted so far.
    pub fn mark(&self) -> Result<PendingCopy> {
        // SAFETY: nothing is copied.
        unsafe { self.pinned.start_copy(&self.stream, 0, 0) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Stream, kernels and buffers are destroyed next.
        let _ = self.stream.wait();
    }
}

//! Pinned host memory, and asynchronous downloads that any thread can wait for.
//!
//! A download waits for the event behind its own copy only, not for later work on the stream.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard};

use super::event::Event;
use super::primary_context::PrimaryContext;
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::sys::driver::DevicePtr;
use kiln_base::lock;

/// Maximum number of buffers kept for reuse.
const MAX_BUFFERS: usize = 16;

/// Pinned host memory, freed on drop.
pub(crate) struct PinnedMemory {
    primary: Arc<PrimaryContext>,
    host: *mut c_void,
}

// SAFETY: the driver's memory may be used from any thread.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    pub fn new(primary: &Arc<PrimaryContext>, bytes: usize) -> Result<PinnedMemory> {
        primary.make_current()?;
        let mut host = null_mut();
        // SAFETY: the address is written.
        let status = unsafe { (primary.driver.host_alloc)(&mut host, bytes.max(1), 0) };
        primary.driver.check("cuMemHostAlloc", status).map_err(|e| match e {
            Error::Call { call, what } => Error::Call { call, what: format!("{what} ({bytes} bytes)") },
            other => other,
        })?;
        Ok(PinnedMemory { primary: Arc::clone(primary), host })
    }

    /// Host address.
    pub fn ptr(&self) -> *mut c_void {
        self.host
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.primary.make_current().is_ok() {
            // SAFETY: the last use.
            unsafe { (self.primary.driver.host_free)(self.host) };
        }
    }
}

/// A pool of pinned buffers and events.
pub(crate) struct PinnedPool {
    primary: Arc<PrimaryContext>,
    buffers: Mutex<Vec<Buffer>>,
}

/// A pinned buffer and the event after its last copy; `host` is `None` for a plain marker on the stream.
struct Buffer {
    host: Option<PinnedMemory>,
    size: usize,
    event: Event,
}

impl PinnedPool {
    pub fn new(primary: &Arc<PrimaryContext>) -> Arc<PinnedPool> {
        Arc::new(PinnedPool { primary: Arc::clone(primary), buffers: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        lock(&self.buffers)
    }

    /// Returns a buffer that no copy writes to.
    fn acquire(&self, bytes: usize) -> Result<Buffer> {
        let mut buffers = self.lock();
        // Leave much larger buffers to larger copies.
        let fits = |buffer: &Buffer| buffer.size >= bytes && buffer.size <= 2 * bytes;
        if let Some(i) = buffers.iter().position(|buffer| fits(buffer) && buffer.event.is_complete()) {
            return Ok(buffers.swap_remove(i));
        }
        drop(buffers);
        let host = if bytes == 0 { None } else { Some(PinnedMemory::new(&self.primary, bytes)?) };
        Ok(Buffer { host, size: bytes, event: Event::blocking(&self.primary)? })
    }

    /// Returns a buffer to the pool; a copy may still be writing to it.
    fn recycle(&self, buffer: Buffer) {
        let mut buffers = self.lock();
        buffers.push(buffer);
        // Entries without memory don't count.
        let count = buffers.iter().filter(|buffer| buffer.host.is_some()).count();
        let oldest = buffers.iter().position(|buffer| buffer.host.is_some()).filter(|_| count > MAX_BUFFERS);
        let oldest = oldest.map(|oldest| buffers.remove(oldest));
        drop(buffers);
        drop(oldest);
    }

    /// Starts a copy of `bytes` bytes to the host and records an event behind it. Without bytes it is only the event.
    ///
    /// # Safety
    ///
    /// `from` points to at least `bytes` bytes.
    pub unsafe fn start_copy(
        self: &Arc<Self>,
        stream: &Stream,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<PendingCopy> {
        let buffer = self.acquire(bytes)?;
        // From here on, dropping it returns the buffer.
        let copy = PendingCopy { pinned: Arc::clone(self), buffer: Some(buffer), bytes };
        if let Some(buffer) = &copy.buffer {
            if let Some(host) = &buffer.host {
                // SAFETY: the buffer is large enough and is not reused before its event.
                unsafe { stream.copy_to_host(from, host.ptr(), bytes)? };
            }
            stream.record(&buffer.event)?;
        }
        Ok(copy)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The last copy may be in flight.
        let _ = self.event.wait();
    }
}

/// A point on a stream, and the bytes that are on the host once the GPU reaches it.
pub(crate) struct PendingCopy {
    pinned: Arc<PinnedPool>,
    /// `None` once returned to the pool.
    buffer: Option<Buffer>,
    bytes: usize,
}

impl PendingCopy {
    /// Waits for the GPU and returns the bytes.
    pub fn wait(self) -> Result<Vec<u8>> {
        let Some(buffer) = &self.buffer else { return Ok(Vec::new()) };
        buffer.event.wait()?;
        let Some(host) = &buffer.host else { return Ok(Vec::new()) };
        // SAFETY: the copy has written that many bytes, and nothing else writes to the buffer while this owns it.
        Ok(unsafe { std::slice::from_raw_parts(host.ptr().cast::<u8>(), self.bytes) }.to_vec())
    }
}

impl Drop for PendingCopy {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pinned.recycle(buffer);
        }
    }
}

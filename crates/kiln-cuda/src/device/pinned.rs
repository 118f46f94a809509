//! Host memory that the GPU reads and writes by itself, and copies into it that are waited for later, on any thread.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard};

use super::event::Event;
use super::primary::Primary;
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::sys::driver::DevicePtr;
use kiln_base::lock;

/// Buffers that are kept for the next copies.
const KEPT: usize = 16;

/// Pinned host memory, freed at the end.
pub(crate) struct PinnedMemory {
    primary: Arc<Primary>,
    host: *mut c_void,
}

// SAFETY: the driver's memory may be used from any thread.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    pub fn new(primary: &Arc<Primary>, bytes: usize) -> Result<PinnedMemory> {
        primary.enter()?;
        let mut host = null_mut();
        // SAFETY: the address is written.
        let status = unsafe { (primary.driver.host_alloc)(&mut host, bytes.max(1), 0) };
        primary.driver.check("cuMemHostAlloc", status).map_err(|e| match e {
            Error::Call { call, what } => Error::Call { call, what: format!("{what} ({bytes} bytes)") },
            other => other,
        })?;
        Ok(PinnedMemory { primary: Arc::clone(primary), host })
    }

    /// Where it begins.
    pub fn at(&self) -> *mut c_void {
        self.host
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.primary.enter().is_ok() {
            // SAFETY: the last use.
            unsafe { (self.primary.driver.host_free)(self.host) };
        }
    }
}

/// Pinned buffers and events in reserve.
pub(crate) struct Pinned {
    primary: Arc<Primary>,
    kept: Mutex<Vec<Buffer>>,
}

/// A pinned buffer and the event of the last copy into it; no buffer where only a place on a stream is marked.
struct Buffer {
    host: Option<PinnedMemory>,
    size: usize,
    event: Event,
}

impl Pinned {
    pub fn new(primary: &Arc<Primary>) -> Arc<Pinned> {
        Arc::new(Pinned { primary: Arc::clone(primary), kept: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        lock(&self.kept)
    }

    /// A buffer that no copy writes to any more.
    fn take(&self, bytes: usize) -> Result<Buffer> {
        let mut kept = self.lock();
        // A much larger one would be missed by the copy it was made for.
        let fits = |buffer: &Buffer| buffer.size >= bytes && buffer.size <= 2 * bytes;
        if let Some(i) = kept.iter().position(|buffer| fits(buffer) && buffer.event.is_past()) {
            return Ok(kept.swap_remove(i));
        }
        drop(kept);
        let host = if bytes == 0 { None } else { Some(PinnedMemory::new(&self.primary, bytes)?) };
        Ok(Buffer { host, size: bytes, event: Event::blocking(&self.primary)? })
    }

    /// Takes a buffer back, whatever still writes to it.
    fn give(&self, buffer: Buffer) {
        let mut kept = self.lock();
        kept.push(buffer);
        // Events alone cost nothing.
        let buffers = || kept.iter().filter(|buffer| buffer.host.is_some());
        let oldest =
            kept.iter().position(|buffer| buffer.host.is_some()).filter(|_| buffers().count() > KEPT);
        let oldest = oldest.map(|oldest| kept.remove(oldest));
        drop(kept);
        drop(oldest);
    }

    /// Marks a place on a stream, and before it copies `bytes` bytes to the host.
    ///
    /// # Safety
    ///
    /// So many bytes are there.
    pub unsafe fn copy(self: &Arc<Self>, stream: &Stream, from: DevicePtr, bytes: usize) -> Result<Arrival> {
        let buffer = self.take(bytes)?;
        // From here on its end gives the buffer back.
        let arrival = Arrival { pinned: Arc::clone(self), buffer: Some(buffer), bytes };
        if let Some(buffer) = &arrival.buffer {
            if let Some(host) = &buffer.host {
                // SAFETY: the buffer has room, and is given to nobody else before its event.
                unsafe { stream.copy_to_host(from, host.at(), bytes)? };
            }
            stream.record(&buffer.event)?;
        }
        Ok(arrival)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The last copy may be under way.
        let _ = self.event.wait();
    }
}

/// A place on a stream, and bytes that are on the host when the GPU has come to it.
pub(crate) struct Arrival {
    pinned: Arc<Pinned>,
    /// `None` once it went back.
    buffer: Option<Buffer>,
    bytes: usize,
}

impl Arrival {
    /// Waits for the GPU to come to the place, and takes the bytes.
    pub fn wait(self) -> Result<Vec<u8>> {
        let Some(buffer) = &self.buffer else { return Ok(Vec::new()) };
        buffer.event.wait()?;
        let Some(host) = &buffer.host else { return Ok(Vec::new()) };
        // SAFETY: the copy has written so many bytes, and nothing else writes there while this has the buffer.
        Ok(unsafe { std::slice::from_raw_parts(host.at().cast::<u8>(), self.bytes) }.to_vec())
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pinned.give(buffer);
        }
    }
}

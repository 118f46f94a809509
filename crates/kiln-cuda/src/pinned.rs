//! Host memory that the GPU writes by itself, and events: copies to the host that are waited for later, on any thread.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::device::Device;
use crate::sys::driver::{DevicePtr, Driver, EVENT_BLOCKING, EVENT_NO_TIME};

/// Buffers and events that are kept for the next copy.
const KEPT: usize = 8;

/// Events and pinned buffers in reserve.
#[derive(Default)]
pub(crate) struct Pinned(Mutex<Vec<Buffer>>);

/// A pinned buffer, null where only a place on the stream is marked, and the event of the last copy into it.
struct Buffer {
    host: *mut c_void,
    size: usize,
    event: *mut c_void,
}

// SAFETY: the driver's handles and memory may be used from any thread that has made the context current.
unsafe impl Send for Buffer {}

impl Pinned {
    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer that no copy writes to any more; the context is current.
    fn take(&self, driver: &Driver, bytes: usize) -> Result<Buffer> {
        // SAFETY: the event lives.
        let done = |buffer: &Buffer| unsafe { (driver.event_query)(buffer.event) } == 0;
        let mut kept = self.lock();
        // A much larger one would be missed by the copy it was made for.
        let fits = |buffer: &Buffer| buffer.size >= bytes && buffer.size <= 2 * bytes;
        if let Some(i) = kept.iter().position(|buffer| fits(buffer) && done(buffer)) {
            return Ok(kept.swap_remove(i));
        }
        drop(kept);
        Buffer::new(driver, bytes)
    }

    /// Takes a buffer back, whatever still writes to it; the context is current.
    fn give(&self, driver: &Driver, buffer: Buffer) {
        let mut kept = self.lock();
        kept.push(buffer);
        let oldest = (kept.len() > KEPT).then(|| kept.remove(0));
        drop(kept);
        if let Some(oldest) = oldest {
            oldest.free(driver);
        }
    }

    /// Gives everything back; the context is current.
    pub fn free(&mut self, driver: &Driver) {
        let kept = std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner));
        kept.into_iter().for_each(|buffer| buffer.free(driver));
    }
}

impl Buffer {
    fn new(driver: &Driver, size: usize) -> Result<Buffer> {
        let mut buffer = Buffer { host: null_mut(), size, event: null_mut() };
        // SAFETY: both calls write a handle.
        let made = unsafe {
            // Who waits sleeps.
            let status = (driver.event_create)(&mut buffer.event, EVENT_BLOCKING | EVENT_NO_TIME);
            driver.check("cuEventCreate", status).and_then(|()| match size {
                0 => Ok(()),
                _ => driver.check("cuMemHostAlloc", (driver.host_alloc)(&mut buffer.host, size, 0)),
            })
        };
        if let Err(e) = made {
            buffer.free(driver);
            return Err(e);
        }
        Ok(buffer)
    }

    fn free(self, driver: &Driver) {
        // SAFETY: the last use, after the last copy; what was not made is null.
        unsafe {
            if !self.event.is_null() {
                (driver.event_wait)(self.event);
                (driver.event_destroy)(self.event);
            }
            if !self.host.is_null() {
                (driver.host_free)(self.host);
            }
        }
    }
}

/// A place on the stream, and bytes that are on the host when the GPU has come to it.
pub(crate) struct Arrival {
    device: Arc<Device>,
    /// `None` once it went back.
    buffer: Option<Buffer>,
    bytes: usize,
}

impl Device {
    /// Marks a place on the stream.
    pub fn mark(self: &Arc<Self>) -> Result<Arrival> {
        self.download_later(0, 0)
    }

    /// Copies to the host without waiting.
    pub fn download_later(self: &Arc<Self>, from: DevicePtr, bytes: usize) -> Result<Arrival> {
        self.not_recording("cuMemcpyDtoHAsync")?;
        self.enter()?;
        let buffer = self.pinned.take(&self.driver, bytes)?;
        let (host, event) = (buffer.host, buffer.event);
        // From here on its end gives the buffer back.
        let arrival = Arrival { device: Arc::clone(self), buffer: Some(buffer), bytes };
        let driver = &self.driver;
        // SAFETY: the buffer has room, and is given to nobody else before the event; both live as long as the device.
        unsafe {
            if bytes > 0 {
                let status = (driver.copy_to_host)(host, from, bytes, self.stream());
                driver.check("cuMemcpyDtoHAsync", status)?;
            }
            driver.check("cuEventRecord", (driver.event_record)(event, self.stream()))?;
        }
        Ok(arrival)
    }
}

impl Arrival {
    /// Waits for the GPU to come to the place, and takes the bytes.
    pub fn wait(self) -> Result<Vec<u8>> {
        let Some(buffer) = &self.buffer else { return Ok(Vec::new()) };
        let driver = &self.device.driver;
        self.device.enter()?;
        // SAFETY: the event was recorded.
        driver.check("cuEventSynchronize", unsafe { (driver.event_wait)(buffer.event) })?;
        if buffer.host.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: the copy has written so many bytes, and nothing else writes there while this has the buffer.
        Ok(unsafe { std::slice::from_raw_parts(buffer.host.cast::<u8>(), self.bytes) }.to_vec())
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && self.device.enter().is_ok()
        {
            self.device.pinned.give(&self.device.driver, buffer);
        }
    }
}

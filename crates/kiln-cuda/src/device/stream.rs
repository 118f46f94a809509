//! Streams: queues of work that run in submission order.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use super::event::Event;
use super::primary_context::PrimaryContext;
use crate::error::Result;
use crate::sys::driver::{DevicePtr, STREAM_NON_BLOCKING};

/// A stream, destroyed on drop.
pub(crate) struct Stream {
    primary: Arc<PrimaryContext>,
    handle: *mut c_void,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(primary: &Arc<PrimaryContext>) -> Result<Stream> {
        primary.make_current()?;
        let mut handle = null_mut();
        // SAFETY: the stream is written.
        let status = unsafe { (primary.driver.stream_create)(&mut handle, STREAM_NON_BLOCKING) };
        primary.driver.check("cuStreamCreate", status)?;
        Ok(Stream { primary: Arc::clone(primary), handle })
    }

    /// The driver's handle.
    pub fn raw(&self) -> *mut c_void {
        self.handle
    }

    /// Waits for all work submitted so far.
    pub fn wait(&self) -> Result<()> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        // SAFETY: the stream lives.
        driver.check("cuStreamSynchronize", unsafe { (driver.stream_wait)(self.handle) })
    }

    /// Records an event behind the work submitted so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        // SAFETY: both live.
        driver.check("cuEventRecord", unsafe { (driver.event_record)(event.raw(), self.handle) })
    }

    /// Makes later work wait for an event; one that was never recorded does not block.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        // SAFETY: both live.
        let status = unsafe { (driver.stream_wait_event)(self.handle, event.raw(), 0) };
        driver.check("cuStreamWaitEvent", status)
    }

    /// Runs `work` and returns its time on this stream, in milliseconds.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        let (begin, end) = (Event::timed(&self.primary)?, Event::timed(&self.primary)?);
        self.record(&begin)?;
        work()?;
        self.record(&end)?;
        end.wait()?;
        end.elapsed_since(&begin)
    }

    /// Copies within the device.
    ///
    /// # Safety
    ///
    /// Both addresses have at least `bytes` bytes.
    pub unsafe fn copy(&self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<()> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        // SAFETY: as the caller promises.
        let status = unsafe { (driver.copy_on_device)(to, from, bytes, self.handle) };
        driver.check("cuMemcpyDtoDAsync", status)
    }

    /// Copies from the host. Pageable memory is read before this returns, pinned memory asynchronously.
    ///
    /// # Safety
    ///
    /// Both addresses have at least `bytes` bytes; pinned memory stays unchanged until the copy is done.
    pub unsafe fn copy_to_device(&self, host: *const c_void, to: DevicePtr, bytes: usize) -> Result<()> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        // SAFETY: as the caller promises.
        let status = unsafe { (driver.copy_to_device)(to, host, bytes, self.handle) };
        driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies to the host; asynchronous if the host memory is pinned.
    ///
    /// # Safety
    ///
    /// Both addresses have at least `bytes` bytes; the host memory is not accessed until the copy is done.
    pub unsafe fn copy_to_host(&self, from: DevicePtr, host: *mut c_void, bytes: usize) -> Result<()> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        // SAFETY: as the caller promises.
        let status = unsafe { (driver.copy_to_host)(host, from, bytes, self.handle) };
        driver.check("cuMemcpyDtoHAsync", status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.primary.make_current().is_ok() {
            // SAFETY: the last use.
            unsafe { (self.primary.driver.stream_destroy)(self.handle) };
        }
    }
}

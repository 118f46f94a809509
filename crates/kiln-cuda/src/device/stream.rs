//! A stream: work in the order in which it was submitted.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use super::event::Event;
use super::primary::Primary;
use crate::error::Result;
use crate::sys::driver::{DevicePtr, STREAM_NON_BLOCKING};

/// A stream, destroyed at the end.
pub(crate) struct Stream {
    primary: Arc<Primary>,
    handle: *mut c_void,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(primary: &Arc<Primary>) -> Result<Stream> {
        primary.enter()?;
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

    /// Waits for all work so far.
    pub fn wait(&self) -> Result<()> {
        self.primary.enter()?;
        let driver = &self.primary.driver;
        // SAFETY: the stream lives.
        driver.check("cuStreamSynchronize", unsafe { (driver.stream_wait)(self.handle) })
    }

    /// Marks the end of the work so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.primary.enter()?;
        let driver = &self.primary.driver;
        // SAFETY: both live.
        driver.check("cuEventRecord", unsafe { (driver.event_record)(event.raw(), self.handle) })
    }

    /// What comes from now on waits for an event; one that was never recorded keeps nobody waiting.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.primary.enter()?;
        let driver = &self.primary.driver;
        // SAFETY: both live.
        let status = unsafe { (driver.stream_wait_event)(self.handle, event.raw(), 0) };
        driver.check("cuStreamWaitEvent", status)
    }

    /// Milliseconds that some work takes on this stream.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        let (begin, end) = (Event::timed(&self.primary)?, Event::timed(&self.primary)?);
        self.record(&begin)?;
        work()?;
        self.record(&end)?;
        end.wait()?;
        end.since(&begin)
    }

    /// Copies within the device.
    ///
    /// # Safety
    ///
    /// Both blocks have that size.
    pub unsafe fn copy(&self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<()> {
        self.primary.enter()?;
        let driver = &self.primary.driver;
        // SAFETY: as the caller promises.
        let status = unsafe { (driver.copy_on_device)(to, from, bytes, self.handle) };
        driver.check("cuMemcpyDtoDAsync", status)
    }

    /// Copies from the host. Pageable memory is read before this returns, pinned memory when the GPU comes to it.
    ///
    /// # Safety
    ///
    /// Both have that size; pinned memory stays as it is until the copy is done.
    pub unsafe fn copy_to_device(&self, host: *const c_void, to: DevicePtr, bytes: usize) -> Result<()> {
        self.primary.enter()?;
        let driver = &self.primary.driver;
        // SAFETY: as the caller promises.
        let status = unsafe { (driver.copy_to_device)(to, host, bytes, self.handle) };
        driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies to the host, without waiting where its memory is pinned.
    ///
    /// # Safety
    ///
    /// Both have that size, and the host's memory is left alone until the copy is done.
    pub unsafe fn copy_to_host(&self, from: DevicePtr, host: *mut c_void, bytes: usize) -> Result<()> {
        self.primary.enter()?;
        let driver = &self.primary.driver;
        // SAFETY: as the caller promises.
        let status = unsafe { (driver.copy_to_host)(host, from, bytes, self.handle) };
        driver.check("cuMemcpyDtoHAsync", status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.primary.enter().is_ok() {
            // SAFETY: the last use.
            unsafe { (self.primary.driver.stream_destroy)(self.handle) };
        }
    }
}

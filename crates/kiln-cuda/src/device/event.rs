//! Events: points on a stream that can be waited for.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use super::primary_context::PrimaryContext;
use crate::error::Result;
use crate::sys::driver::{EVENT_BLOCKING, EVENT_NO_TIME};

/// An event, destroyed on drop.
pub(crate) struct Event {
    primary: Arc<PrimaryContext>,
    handle: *mut c_void,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Event {}

impl Event {
    /// An event that records its time.
    pub fn timed(primary: &Arc<PrimaryContext>) -> Result<Event> {
        Event::new(primary, 0)
    }

    /// An event without time, for other streams to wait on.
    pub fn untimed(primary: &Arc<PrimaryContext>) -> Result<Event> {
        Event::new(primary, EVENT_NO_TIME)
    }

    /// An event without time, on which threads block instead of spinning.
    pub fn blocking(primary: &Arc<PrimaryContext>) -> Result<Event> {
        Event::new(primary, EVENT_BLOCKING | EVENT_NO_TIME)
    }

    fn new(primary: &Arc<PrimaryContext>, flags: u32) -> Result<Event> {
        primary.make_current()?;
        let mut handle = null_mut();
        // SAFETY: the event is written.
        let status = unsafe { (primary.driver.event_create)(&mut handle, flags) };
        primary.driver.check("cuEventCreate", status)?;
        Ok(Event { primary: Arc::clone(primary), handle })
    }

    /// The driver's handle.
    pub fn raw(&self) -> *mut c_void {
        self.handle
    }

    /// Whether the GPU has reached it; `true` if it was never recorded.
    pub fn is_complete(&self) -> bool {
        // SAFETY: the event lives.
        self.primary.make_current().is_ok() && unsafe { (self.primary.driver.event_query)(self.handle) } == 0
    }

    /// Waits until the GPU reaches it.
    pub fn wait(&self) -> Result<()> {
        self.primary.make_current()?;
        // SAFETY: the event lives.
        let status = unsafe { (self.primary.driver.event_wait)(self.handle) };
        self.primary.driver.check("cuEventSynchronize", status)
    }

    /// Milliseconds from `begin` to this event; both are timed and complete.
    pub fn elapsed_since(&self, begin: &Event) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both live.
        let status =
            unsafe { (self.primary.driver.event_elapsed)(&mut milliseconds, begin.handle, self.handle) };
        self.primary.driver.check("cuEventElapsedTime", status).map(|()| milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.primary.make_current().is_ok() {
            // SAFETY: the last use.
            unsafe { (self.primary.driver.event_destroy)(self.handle) };
        }
    }
}

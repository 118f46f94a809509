//! How long work takes on a device.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::Device;
use crate::Result;
use crate::sys::driver::Driver;

impl Device {
    /// Milliseconds that some work takes on the device.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.not_recording("cuEventSynchronize")?;
        self.enter()?;
        let (begin, end) = (Event::new(&self.driver)?, Event::new(&self.driver)?);
        begin.record(self.raw.stream)?;
        work()?;
        end.record(self.raw.stream)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events were recorded.
        unsafe {
            self.driver.check("cuEventSynchronize", (self.driver.event_wait)(end.event))?;
            let status = (self.driver.event_elapsed)(&mut milliseconds, begin.event, end.event);
            self.driver.check("cuEventElapsedTime", status)?;
        }
        Ok(milliseconds)
    }
}

struct Event<'a> {
    driver: &'a Driver,
    event: *mut c_void,
}

impl Event<'_> {
    fn new(driver: &Driver) -> Result<Event<'_>> {
        let mut event = null_mut();
        // SAFETY: the event is written.
        driver.check("cuEventCreate", unsafe { (driver.event_create)(&mut event, 0) })?;
        Ok(Event { driver, event })
    }

    fn record(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: both live.
        self.driver.check("cuEventRecord", unsafe { (self.driver.event_record)(self.event, stream) })
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: the last use.
        unsafe { (self.driver.event_destroy)(self.event) };
    }
}

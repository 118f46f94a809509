//! A GPU's primary context, which every driver call needs.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::options::Options;
use crate::probe::{self, Gpu};
use crate::sys::driver::Driver;

/// The driver and one GPU's primary context, released on drop.
pub(crate) struct PrimaryContext {
    pub driver: Driver,
    pub gpu: Gpu,
    device: i32,
    context: *mut c_void,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Retains the context of a GPU and makes it current on this thread.
    pub fn retain(options: &Options) -> Result<Arc<PrimaryContext>> {
        let ordinal = options.device;
        let driver = probe::driver()?;
        let gpus = probe::gpus(&driver)?;
        let count = gpus.len();
        let gpu = gpus.into_iter().nth(ordinal).ok_or(Error::NoDevice { ordinal, count })?;
        if gpu.capability.0 < 8 {
            let (major, minor) = gpu.capability;
            return Err(Error::TooOld { name: gpu.name, major, minor });
        }
        let gpu = match options.kernels()? {
            Some(capability) => gpu.with_kernels_of(capability)?,
            None => gpu,
        };
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: each call writes what its pointer points to.
        unsafe {
            driver.check("cuDeviceGet", (driver.device_get)(&mut device, ordinal as i32))?;
            driver.check("cuDevicePrimaryCtxRetain", (driver.context_retain)(&mut context, device))?;
        }
        let primary = PrimaryContext { driver, gpu, device, context };
        primary.make_current()?;
        Ok(Arc::new(primary))
    }

    /// Makes the context current on this thread.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.context) })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: the last use.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

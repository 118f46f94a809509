//! Copies between the host and a device, and within it.

use std::sync::{MutexGuard, PoisonError};

use super::Device;
use crate::Result;
use crate::staging::{LARGE, Staging};
use crate::sys::driver::DevicePtr;

impl Device {
    /// Copies from the host; the bytes may go away when this returns.
    pub fn upload(&self, bytes: &[u8], to: DevicePtr) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.not_recording("cuMemcpyHtoDAsync")?;
        self.enter()?;
        if bytes.len() >= LARGE
            && let Some(staging) = self.staging().as_mut().and_then(Option::as_mut)
        {
            return staging.upload(&self.driver, bytes, to, self.raw.stream);
        }
        // SAFETY: the caller has a block of that size; pageable memory is read before the call returns.
        let status =
            unsafe { (self.driver.copy_to_device)(to, bytes.as_ptr().cast(), bytes.len(), self.raw.stream) };
        self.driver.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies to the host and waits.
    pub fn download(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.not_recording("cuMemcpyDtoHAsync")?;
        self.enter()?;
        if bytes.len() >= LARGE
            && let Some(staging) = self.staging().as_ref().and_then(Option::as_ref)
        {
            return staging.download(&self.driver, from, bytes, self.raw.stream);
        }
        // SAFETY: the buffer outlives the wait.
        let status = unsafe {
            (self.driver.copy_to_host)(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw.stream)
        };
        self.driver.check("cuMemcpyDtoHAsync", status)?;
        self.wait()
    }

    /// The way of large copies; the context is current.
    fn staging(&self) -> MutexGuard<'_, Option<Option<Staging>>> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.get_or_insert_with(|| Staging::new(&self.driver).ok());
        staging
    }

    /// Copies within the device.
    pub fn copy(&self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: both blocks have that size.
        let status = unsafe { (self.driver.copy_on_device)(to, from, bytes, self.stream()) };
        self.driver.check("cuMemcpyDtoDAsync", status)
    }
}

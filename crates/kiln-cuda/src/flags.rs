//! Flags by which blocks of one launch tell each other that something is there.

use std::sync::{Mutex, PoisonError};

use crate::device::Device;
use crate::sys::driver::DevicePtr;
use crate::{Error, Result};

/// Some words of the device's memory that are zero between launches: a kernel that raises a flag takes it down again.
#[derive(Default)]
pub(crate) struct Flags(Mutex<Option<(DevicePtr, usize)>>);

impl Flags {
    /// Where they lie: two for each multiprocessor.
    pub fn at(&self, device: &Device) -> Result<DevicePtr> {
        let mut flags = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, _)) = *flags {
            return Ok(at);
        }
        let zeros = vec![0; 2 * size_of::<u32>() * device.gpu.processors.max(1) as usize];
        let none = || Error::Call { call: "cuMemAlloc", what: "no memory for flags".into() };
        let block = device.take(zeros.len())?.ok_or_else(none)?;
        device.upload(&zeros, block.0)?;
        *flags = Some(block);
        Ok(block.0)
    }

    /// The memory, for who gives it back when nothing runs any more.
    pub fn end(&mut self) -> Option<(DevicePtr, usize)> {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take()
    }
}

//! Flags for synchronisation between thread blocks of one launch.

use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::queue::{DeviceBuffer, Queue};
use crate::sys::driver::DevicePtr;
use kiln_base::lock;

/// Device words that are zero between launches: a kernel clears every flag it sets.
#[derive(Default)]
pub(crate) struct BlockFlags(Mutex<Option<DeviceBuffer>>);

impl BlockFlags {
    /// Returns the address of the flags, three per multiprocessor.
    pub fn ptr(&self, queue: &Queue) -> Result<DevicePtr> {
        let mut flags = lock(&self.0);
        if let Some(buffer) = &*flags {
            return Ok(buffer.ptr(queue));
        }
        let zeros = vec![0; 3 * size_of::<u32>() * queue.gpu().multiprocessors.max(1) as usize];
        let none = || Error::Call { call: "cuMemAlloc", what: "no memory for flags".into() };
        // The memory outlives a recording, so it must not come from one.
        queue.device("cuMemAlloc")?;
        let buffer = queue.allocate(zeros.len())?.ok_or_else(none)?;
        queue.upload(&zeros, buffer.ptr(queue))?;
        Ok(flags.insert(buffer).ptr(queue))
    }
}

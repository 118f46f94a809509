//! Flags by which blocks of one launch tell each other that something is there.

use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::queue::{Block, Queue};
use crate::sys::driver::DevicePtr;
use kiln_base::lock;

/// Some words of the device's memory that are zero between launches: a kernel that raises a flag takes it down again.
#[derive(Default)]
pub(crate) struct Flags(Mutex<Option<Block>>);

impl Flags {
    /// Where they lie: two for each multiprocessor.
    pub fn at(&self, queue: &Queue) -> Result<DevicePtr> {
        let mut flags = lock(&self.0);
        if let Some(block) = &*flags {
            return Ok(block.at(queue));
        }
        let zeros = vec![0; 2 * size_of::<u32>() * queue.gpu().processors.max(1) as usize];
        let none = || Error::Call { call: "cuMemAlloc", what: "no memory for flags".into() };
        // Kept, so it is not to be a recording's.
        queue.device("cuMemAlloc")?;
        let block = queue.memory(zeros.len())?.ok_or_else(none)?;
        queue.upload(&zeros, block.at(queue))?;
        Ok(flags.insert(block).at(queue))
    }
}

//! A device's memory, in blocks that go back to its arena by themselves.

use std::sync::Arc;

use super::Device;
use crate::Result;
use crate::arena;
use crate::replay::Pool;
use crate::sys::driver::{DevicePtr, OUT_OF_MEMORY};

impl Device {
    /// Bytes of the device's memory that this process may still use: those that nobody has and its own reserve, up to the limit.
    pub fn free(&self) -> Result<usize> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers are written.
        self.driver.check("cuMemGetInfo", unsafe { (self.driver.mem_info)(&mut free, &mut total) })?;
        Ok(self.arena.room(free))
    }

    /// Bytes of this device's memory that this process holds for tensors and weights.
    pub fn held(&self) -> usize {
        self.arena.held()
    }

    /// Memory for `bytes` bytes; `None` when there is no more.
    pub fn memory(self: &Arc<Self>, bytes: usize) -> Result<Option<Block>> {
        let (device, pool) = (Arc::clone(self), self.recording_pool());
        let block = match &pool {
            Some(pool) => pool.take(bytes),
            None => self.take(bytes)?,
        };
        Ok(block.map(|(at, size)| Block { device, at, size, pool }))
    }

    /// Address and size of a block that nobody gives back by himself.
    pub fn take(&self, bytes: usize) -> Result<Option<(DevicePtr, usize)>> {
        self.not_recording("cuMemAlloc")?;
        self.enter()?;
        let take = || self.arena.take(&FromDriver(self), bytes);
        Ok(take().or_else(|| if self.recorded.drop_all() { take() } else { None }))
    }

    /// The same as far as that makes no work wait.
    pub fn take_gently(&self, bytes: usize) -> Option<(DevicePtr, usize)> {
        self.enter().ok()?;
        self.arena.take_gently(&FromDriver(self), bytes)
    }

    /// Takes back what [`Device::take`] gave.
    pub fn give(&self, at: DevicePtr, size: usize) {
        self.arena.give(at, size);
    }

    /// Gives free memory back to the driver.
    pub fn release(&self) {
        if self.not_recording("cuMemFree").and_then(|()| self.enter()).is_ok() {
            self.arena.release(&FromDriver(self));
        }
    }

    /// The most bytes that were held at once.
    pub fn peak(&self) -> usize {
        self.arena.peak()
    }
}

/// The driver as the arena's source; the context is current.
pub(super) struct FromDriver<'a>(pub &'a Device);

impl arena::Source for FromDriver<'_> {
    fn take(&self, bytes: usize) -> Option<DevicePtr> {
        let mut at = 0;
        // SAFETY: the address is written.
        let status = unsafe { (self.0.driver.mem_alloc)(&mut at, bytes) };
        debug_assert!(status == 0 || status == OUT_OF_MEMORY, "cuMemAlloc: {status}");
        (status == 0).then_some(at)
    }

    fn give(&self, at: DevicePtr) {
        // SAFETY: the driver gave it, nobody owns it any more, and freeing waits for work that is still under way.
        unsafe { (self.0.driver.mem_free)(at) };
    }
}

/// Memory of a device, given back to its arena at the end.
pub(crate) struct Block {
    device: Arc<Device>,
    at: DevicePtr,
    size: usize,
    /// What it goes back to, where that isn't the arena.
    pool: Option<Arc<Pool>>,
}

impl Block {
    /// Memory that belongs to somebody else.
    pub fn lent(device: &Arc<Device>, at: DevicePtr) -> Block {
        Block { device: Arc::clone(device), at, size: 0, pool: None }
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        self.at
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match &self.pool {
            _ if self.size == 0 => {}
            Some(pool) => pool.give(self.at, self.size),
            None => self.device.arena.give(self.at, self.size),
        }
    }
}

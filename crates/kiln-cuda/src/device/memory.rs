//! GPU memory: allocations that return to their allocator on drop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::allocator::{CachingAllocator, RawAllocator};
use super::primary_context::PrimaryContext;
use crate::error::Result;
use crate::sys::driver::{DevicePtr, OUT_OF_MEMORY};
use kiln_base::lock;

/// An owner of memory that can be given up when memory runs out.
pub(crate) trait Evictable: Send + Sync {
    /// Drops what can be recreated; returns `false` if there was nothing.
    fn evict(&self) -> bool;
}

/// This process's memory on one GPU.
pub(crate) struct DeviceMemory {
    primary: Arc<PrimaryContext>,
    allocator: CachingAllocator,
    /// Evicted when memory runs out.
    evictables: Mutex<Vec<Weak<dyn Evictable>>>,
}

impl DeviceMemory {
    /// `limit`: maximum bytes to hold.
    pub fn new(primary: &Arc<PrimaryContext>, limit: Option<usize>) -> Arc<DeviceMemory> {
        let (primary, allocator) = (Arc::clone(primary), CachingAllocator::new(limit));
        Arc::new(DeviceMemory { primary, allocator, evictables: Mutex::default() })
    }

    /// Bytes that can still be allocated: free memory and cached blocks, up to the limit.
    pub fn available(&self) -> Result<usize> {
        self.primary.make_current()?;
        let driver = &self.primary.driver;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both values are written.
        driver.check("cuMemGetInfo", unsafe { (driver.mem_info)(&mut free, &mut total) })?;
        Ok(self.allocator.available(free))
    }

    /// Bytes held for tensors and weights.
    pub fn held(&self) -> usize {
        self.allocator.held()
    }

    /// Maximum bytes held since the last release.
    pub fn peak(&self) -> usize {
        self.allocator.peak()
    }

    /// Returns cached blocks to the driver.
    pub fn release(&self) {
        if self.primary.make_current().is_ok() {
            self.allocator.release(self);
        }
    }

    /// Registers an owner to evict when memory runs out.
    pub fn register_evictable(&self, who: &Weak<dyn Evictable>) {
        let mut all = lock(&self.evictables);
        all.retain(|other| other.strong_count() > 0);
        if !all.iter().any(|other| std::ptr::addr_eq(other.as_ptr(), who.as_ptr())) {
            all.push(Weak::clone(who));
        }
    }

    fn evict(&self) -> bool {
        let all: Vec<_> = {
            let all = lock(&self.evictables);
            all.iter().filter_map(Weak::upgrade).collect()
        };
        // Evict all of them, not only up to the first success.
        all.iter().filter(|who| who.evict()).count() > 0
    }

    /// Allocates at least `bytes` bytes; `None` if there is not enough.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Option<Allocation>> {
        self.primary.make_current()?;
        let allocate = || self.allocator.allocate(&**self, bytes);
        let taken = allocate().or_else(|| if self.evict() { allocate() } else { None });
        Ok(taken.map(|(at, size)| Allocation { at, owner: Owner::DeviceMemory(Arc::clone(self), size) }))
    }

    /// Allocates only if that needs no synchronisation.
    fn allocate_no_release(self: &Arc<Self>, bytes: usize) -> Option<Allocation> {
        self.primary.make_current().ok()?;
        let (at, size) = self.allocator.allocate_no_release(&**self, bytes)?;
        Some(Allocation { at, owner: Owner::DeviceMemory(Arc::clone(self), size) })
    }
}

/// Allocates from the driver; the context has to be current.
impl RawAllocator for DeviceMemory {
    fn allocate(&self, bytes: usize) -> Option<DevicePtr> {
        let mut at = 0;
        // SAFETY: the address is written.
        let status = unsafe { (self.primary.driver.mem_alloc)(&mut at, bytes) };
        debug_assert!(status == 0 || status == OUT_OF_MEMORY, "cuMemAlloc: {status}");
        (status == 0).then_some(at)
    }

    fn free(&self, at: DevicePtr) {
        // SAFETY: the driver allocated it, it has no owner any more, and freeing waits for pending work.
        unsafe { (self.primary.driver.mem_free)(at) };
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.release();
    }
}

/// A block of GPU memory, returned to its owner on drop.
pub(crate) struct Allocation {
    at: DevicePtr,
    owner: Owner,
}

enum Owner {
    /// With the block's actual size.
    DeviceMemory(Arc<DeviceMemory>, usize),
    PrivatePool(Arc<PrivatePool>, usize),
    /// Not owned; dropping it does nothing.
    Borrowed,
}

impl Allocation {
    /// Wraps memory owned elsewhere; the caller keeps it alive.
    pub fn borrowed(at: DevicePtr) -> Allocation {
        Allocation { at, owner: Owner::Borrowed }
    }

    /// Device address.
    pub fn ptr(&self) -> DevicePtr {
        self.at
    }

    /// Size in bytes, at least as requested; 0 for borrowed memory.
    pub fn size(&self) -> usize {
        match &self.owner {
            Owner::DeviceMemory(_, size) | Owner::PrivatePool(_, size) => *size,
            Owner::Borrowed => 0,
        }
    }

    /// The private pool it belongs to, if any.
    pub fn pool(&self) -> Option<&Arc<PrivatePool>> {
        match &self.owner {
            Owner::PrivatePool(pool, _) => Some(pool),
            _ => None,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match &self.owner {
            Owner::DeviceMemory(memory, size) => memory.allocator.free(self.at, *size),
            Owner::PrivatePool(pool, size) => pool.allocator.free(self.at, *size),
            Owner::Borrowed => {}
        }
    }
}

/// A separate pool, for the memory of a CUDA graph. It is freed when the pool and all its blocks are dropped.
pub(crate) struct PrivatePool {
    memory: Arc<DeviceMemory>,
    allocator: CachingAllocator,
    taken: Mutex<Vec<Allocation>>,
    /// Whether work outside the recording used its blocks.
    shared: AtomicBool,
}

impl PrivatePool {
    pub fn new(memory: &Arc<DeviceMemory>) -> Arc<PrivatePool> {
        let (memory, allocator) = (Arc::clone(memory), CachingAllocator::default());
        Arc::new(PrivatePool { memory, allocator, taken: Mutex::default(), shared: AtomicBool::new(false) })
    }

    /// Notes that work outside the recording uses one of its blocks.
    pub fn mark_shared(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    /// Whether [`PrivatePool::mark_shared`] was called.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }

    /// Allocates at least `bytes` bytes; `None` if that would need freeing memory, which synchronises.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Option<Allocation> {
        let (at, size) = self.allocator.allocate_no_release(&**self, bytes)?;
        Some(Allocation { at, owner: Owner::PrivatePool(Arc::clone(self), size) })
    }
}

impl RawAllocator for PrivatePool {
    fn allocate(&self, bytes: usize) -> Option<DevicePtr> {
        let block = self.memory.allocate_no_release(bytes)?;
        let at = block.ptr();
        lock(&self.taken).push(block);
        Some(at)
    }

    fn free(&self, at: DevicePtr) {
        lock(&self.taken).retain(|block| block.ptr() != at);
    }
}

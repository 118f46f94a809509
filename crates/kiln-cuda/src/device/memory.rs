//! A GPU's memory, in blocks that go back to where they came from by themselves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::arena::{Arena, Source};
use super::primary::Primary;
use crate::error::Result;
use crate::sys::driver::{DevicePtr, OUT_OF_MEMORY};
use kiln_base::lock;

/// Somebody who holds memory that others may need more.
pub(crate) trait Reclaim: Send + Sync {
    /// Gives up what can be made again; `false` when there was nothing.
    fn reclaim(&self) -> bool;
}

/// The memory of one GPU, as far as this process holds it.
pub(crate) struct Memory {
    primary: Arc<Primary>,
    arena: Arena,
    /// Asked for memory when there is no more.
    reclaimable: Mutex<Vec<Weak<dyn Reclaim>>>,
}

impl Memory {
    /// `limit`: the most bytes that are ever held.
    pub fn new(primary: &Arc<Primary>, limit: Option<usize>) -> Arc<Memory> {
        let (primary, arena) = (Arc::clone(primary), Arena::new(limit));
        Arc::new(Memory { primary, arena, reclaimable: Mutex::default() })
    }

    /// Bytes that this process may still use: those that nobody has and its own reserve, up to the limit.
    pub fn free(&self) -> Result<usize> {
        self.primary.enter()?;
        let driver = &self.primary.driver;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both numbers are written.
        driver.check("cuMemGetInfo", unsafe { (driver.mem_info)(&mut free, &mut total) })?;
        Ok(self.arena.room(free))
    }

    /// Bytes that this process holds for tensors and weights.
    pub fn held(&self) -> usize {
        self.arena.held()
    }

    /// The most bytes that were held at once.
    pub fn peak(&self) -> usize {
        self.arena.peak()
    }

    /// Gives free memory back to the driver.
    pub fn release(&self) {
        if self.primary.enter().is_ok() {
            self.arena.release(self);
        }
    }

    /// Adds somebody to ask when there is no more memory.
    pub fn reclaim_from(&self, who: &Weak<dyn Reclaim>) {
        let mut all = lock(&self.reclaimable);
        all.retain(|other| other.strong_count() > 0);
        if !all.iter().any(|other| std::ptr::addr_eq(other.as_ptr(), who.as_ptr())) {
            all.push(Weak::clone(who));
        }
    }

    fn reclaim(&self) -> bool {
        let all: Vec<_> = {
            let all = lock(&self.reclaimable);
            all.iter().filter_map(Weak::upgrade).collect()
        };
        // All of them, and not only up to the first who has something.
        all.iter().filter(|who| who.reclaim()).count() > 0
    }

    /// A block of at least `bytes` bytes; `None` when there is no more.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Option<Allocation>> {
        self.primary.enter()?;
        let take = || self.arena.take(&**self, bytes);
        let taken = take().or_else(|| if self.reclaim() { take() } else { None });
        Ok(taken.map(|(at, size)| Allocation { at, owner: Owner::Memory(Arc::clone(self), size) }))
    }

    /// The same as far as that makes no work wait.
    fn take_gently(self: &Arc<Self>, bytes: usize) -> Option<Allocation> {
        self.primary.enter().ok()?;
        let (at, size) = self.arena.take_gently(&**self, bytes)?;
        Some(Allocation { at, owner: Owner::Memory(Arc::clone(self), size) })
    }
}

/// The driver as the arena's source; the context is current.
impl Source for Memory {
    fn take(&self, bytes: usize) -> Option<DevicePtr> {
        let mut at = 0;
        // SAFETY: the address is written.
        let status = unsafe { (self.primary.driver.mem_alloc)(&mut at, bytes) };
        debug_assert!(status == 0 || status == OUT_OF_MEMORY, "cuMemAlloc: {status}");
        (status == 0).then_some(at)
    }

    fn give(&self, at: DevicePtr) {
        // SAFETY: the driver gave it, nobody owns it any more, and freeing waits for work that is still under way.
        unsafe { (self.primary.driver.mem_free)(at) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.release();
    }
}

/// A block of a GPU's memory, given back to its owner at the end.
pub(crate) struct Allocation {
    at: DevicePtr,
    owner: Owner,
}

enum Owner {
    /// With the block's size there.
    Memory(Arc<Memory>, usize),
    Pool(Arc<Pool>, usize),
    /// Whoever lent it.
    Somebody,
}

impl Allocation {
    /// Memory that belongs to somebody else, who takes care that it stays.
    pub fn lent(at: DevicePtr) -> Allocation {
        Allocation { at, owner: Owner::Somebody }
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        self.at
    }

    /// Its size, at least what was asked for.
    pub fn size(&self) -> usize {
        match &self.owner {
            Owner::Memory(_, size) | Owner::Pool(_, size) => *size,
            Owner::Somebody => 0,
        }
    }

    /// The pool that it goes round in, if it does.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        match &self.owner {
            Owner::Pool(pool, _) => Some(pool),
            _ => None,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Memory(memory, size) => memory.arena.give(self.at, *size),
            Owner::Pool(pool, size) => pool.arena.give(self.at, *size),
            Owner::Somebody => {}
        }
    }
}

/// Memory that goes round by itself, apart from all other, and back when the pool and all its blocks are gone.
pub(crate) struct Pool {
    memory: Arc<Memory>,
    arena: Arena,
    taken: Mutex<Vec<Allocation>>,
    /// Whether others have used its blocks.
    shared: AtomicBool,
}

impl Pool {
    pub fn new(memory: &Arc<Memory>) -> Arc<Pool> {
        let (memory, arena) = (Arc::clone(memory), Arena::default());
        Arc::new(Pool { memory, arena, taken: Mutex::default(), shared: AtomicBool::new(false) })
    }

    /// One of its blocks is used by work that it was not made for.
    pub fn share(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    /// Whether that ever was so.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }

    /// A block of at least `bytes` bytes; `None` when there is no more without freeing some, which would wait.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<Allocation> {
        let (at, size) = self.arena.take_gently(&**self, bytes)?;
        Some(Allocation { at, owner: Owner::Pool(Arc::clone(self), size) })
    }
}

impl Source for Pool {
    fn take(&self, bytes: usize) -> Option<DevicePtr> {
        let block = self.memory.take_gently(bytes)?;
        let at = block.at();
        lock(&self.taken).push(block);
        Some(at)
    }

    fn give(&self, at: DevicePtr) {
        lock(&self.taken).retain(|block| block.at() != at);
    }
}

//! A caching allocator for device memory.
//!
//! All work runs on one stream in submission order, so a freed block can be reused at once, even if the GPU has not
//! reached its last use: the new owner's work comes later on the same stream. Allocating from the driver would
//! synchronise the stream.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::sys::driver::DevicePtr;
use kiln_base::lock;

/// The allocator below the cache.
pub(crate) trait RawAllocator {
    /// Allocates memory; `None` if there is not enough.
    fn allocate(&self, bytes: usize) -> Option<DevicePtr>;
    /// Frees memory, after waiting for work that uses it.
    fn free(&self, at: DevicePtr);
}

/// An allocator that keeps freed blocks for reuse.
#[derive(Default)]
pub(crate) struct CachingAllocator {
    state: Mutex<State>,
    /// Maximum bytes to hold.
    limit: Option<usize>,
}

#[derive(Default)]
struct State {
    /// Freed blocks by size.
    cached: BTreeMap<usize, Vec<DevicePtr>>,
    held: usize,
    peak: usize,
}

/// Rounds a size up, so that requests of similar size can share blocks.
fn round_size(bytes: usize) -> usize {
    let step = match bytes {
        0..0x10_0000 => 512,
        0x10_0000..0x400_0000 => 0x1_0000,
        _ => 0x20_0000,
    };
    bytes.next_multiple_of(step)
}

impl CachingAllocator {
    /// An allocator that never holds more than `limit` bytes.
    pub fn new(limit: Option<usize>) -> CachingAllocator {
        CachingAllocator { limit, ..CachingAllocator::default() }
    }

    /// Returns a block of at least `bytes` bytes and its size, releasing cached blocks if memory is short.
    pub fn allocate(&self, raw: &impl RawAllocator, bytes: usize) -> Option<(DevicePtr, usize)> {
        self.allocate_no_release(raw, bytes).or_else(|| {
            lock(&self.state).release(raw);
            self.allocate_no_release(raw, bytes)
        })
    }

    /// [`CachingAllocator::allocate`] without releasing cached blocks.
    pub fn allocate_no_release(&self, raw: &impl RawAllocator, bytes: usize) -> Option<(DevicePtr, usize)> {
        let size = round_size(bytes.max(1));
        let mut state = lock(&self.state);
        // Reuse a slightly larger block; a much larger one is better left for a larger request.
        let fit = state.cached.range(size..=size + size / 4).next().map(|(&size, _)| size);
        if let Some(size) = fit
            && let Some(blocks) = state.cached.get_mut(&size)
            && let Some(at) = blocks.pop()
        {
            if blocks.is_empty() {
                state.cached.remove(&size);
            }
            return Some((at, size));
        }
        let allowed = self.limit.is_none_or(|limit| state.held + size <= limit);
        let at = if allowed { raw.allocate(size)? } else { return None };
        state.held += size;
        state.peak = state.peak.max(state.held);
        Some((at, size))
    }

    /// Puts a block into the cache.
    pub fn free(&self, at: DevicePtr, size: usize) {
        let mut state = lock(&self.state);
        state.cached.entry(size).or_default().push(at);
    }

    /// Frees all cached blocks and restarts the peak count.
    pub fn release(&self, raw: &impl RawAllocator) {
        let mut state = lock(&self.state);
        state.release(raw);
        state.peak = state.held;
    }

    /// Bytes that can still be allocated if the raw allocator has `free` more: cached blocks count, and so does the limit.
    pub fn available(&self, free: usize) -> usize {
        let state = lock(&self.state);
        let cached: usize = state.cached.iter().map(|(size, blocks)| size * blocks.len()).sum();
        let allowed = self.limit.map_or(usize::MAX, |limit| limit.saturating_sub(state.held - cached));
        free.saturating_add(cached).min(allowed)
    }

    /// Bytes allocated from the raw allocator, cached blocks included.
    pub fn held(&self) -> usize {
        lock(&self.state).held
    }

    /// Maximum of [`CachingAllocator::held`] since the last release.
    pub fn peak(&self) -> usize {
        lock(&self.state).peak
    }
}

impl State {
    fn release(&mut self, raw: &impl RawAllocator) {
        for (size, blocks) in std::mem::take(&mut self.cached) {
            for at in blocks {
                raw.free(at);
                self.held -= size;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A raw allocator of limited size that counts requests.
    #[derive(Default)]
    struct CountingAllocator(RefCell<AllocatorCounts>);

    #[derive(Default)]
    struct AllocatorCounts {
        requests: usize,
        /// Addresses and sizes not freed yet.
        live: Vec<(DevicePtr, usize)>,
    }

    const LIMIT: usize = 10 << 20;

    impl RawAllocator for CountingAllocator {
        fn allocate(&self, bytes: usize) -> Option<DevicePtr> {
            let mut counts = self.0.borrow_mut();
            let used: usize = counts.live.iter().map(|(_, size)| size).sum();
            if used + bytes > LIMIT {
                return None;
            }
            counts.requests += 1;
            let at = (counts.requests as DevicePtr) << 30;
            counts.live.push((at, bytes));
            Some(at)
        }

        fn free(&self, at: DevicePtr) {
            self.0.borrow_mut().live.retain(|&(there, _)| there != at);
        }
    }

    #[test]
    fn a_loop_allocates_only_in_its_first_iteration() {
        let (allocator, raw) = (CachingAllocator::default(), CountingAllocator::default());
        for _ in 0..100 {
            let a = allocator.allocate(&raw, 3000).unwrap();
            let b = allocator.allocate(&raw, 70_000).unwrap();
            allocator.free(a.0, a.1);
            allocator.free(b.0, b.1);
        }
        assert_eq!(raw.0.borrow().requests, 2);
    }

    #[test]
    fn two_owners_never_share_a_block() {
        let (allocator, raw) = (CachingAllocator::default(), CountingAllocator::default());
        let a = allocator.allocate(&raw, 512).unwrap();
        let b = allocator.allocate(&raw, 512).unwrap();
        assert_ne!(a.0, b.0);
        allocator.free(a.0, a.1);
        let c = allocator.allocate(&raw, 500).unwrap();
        let d = allocator.allocate(&raw, 500).unwrap();
        assert!(c.0 == a.0 && d.0 != a.0 && d.0 != b.0);
    }

    #[test]
    fn a_small_request_does_not_take_a_large_block() {
        let (allocator, raw) = (CachingAllocator::default(), CountingAllocator::default());
        let large = allocator.allocate(&raw, 4 << 20).unwrap();
        allocator.free(large.0, large.1);
        let small = allocator.allocate(&raw, 1024).unwrap();
        assert_ne!(small.0, large.0);
        assert_eq!(allocator.allocate(&raw, (4 << 20) - 70_000).unwrap().0, large.0);
    }

    #[test]
    fn cached_blocks_are_released_before_an_allocation_fails() {
        let (allocator, raw) = (CachingAllocator::default(), CountingAllocator::default());
        let big = allocator.allocate(&raw, 6 << 20).unwrap();
        allocator.free(big.0, big.1);
        let other = allocator.allocate(&raw, 9 << 20).unwrap();
        assert_eq!(allocator.held(), other.1);
        assert_eq!(allocator.allocate(&raw, 4 << 20), None);
    }

    #[test]
    fn no_more_is_held_than_the_limit_allows() {
        let (allocator, raw) = (CachingAllocator::new(Some(5 << 20)), CountingAllocator::default());
        let four = allocator.allocate(&raw, 4 << 20).unwrap();
        assert_eq!(allocator.allocate(&raw, 2 << 20), None);
        allocator.free(four.0, four.1);
        assert!(allocator.allocate(&raw, 2 << 20).is_some());
        assert_eq!((allocator.held(), allocator.peak()), (2 << 20, 4 << 20));
    }

    #[test]
    fn cached_blocks_count_as_available_up_to_the_limit() {
        let (free, limited) = (CachingAllocator::default(), CachingAllocator::new(Some(5 << 20)));
        for (allocator, after) in [(&free, 10 << 20), (&limited, 4 << 20)] {
            let raw = CountingAllocator::default();
            let kept = allocator.allocate(&raw, 1 << 20).unwrap();
            let given = allocator.allocate(&raw, 3 << 20).unwrap();
            assert_eq!(allocator.available(7 << 20), after - (3 << 20));
            allocator.free(given.0, given.1);
            assert_eq!(allocator.available(7 << 20), after);
            assert_eq!(kept.1, 1 << 20);
        }
    }

    #[test]
    fn blocks_are_never_smaller_than_requested() {
        for bytes in [0, 1, 511, 512, 513, 0xf_ffff, 0x10_0001, 0x3ff_ffff, 0x400_0001] {
            assert!(round_size(bytes) >= bytes);
            assert!(round_size(bytes) <= bytes + bytes / 8 + 512, "{bytes}");
        }
    }
}

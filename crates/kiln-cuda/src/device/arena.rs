//! Device memory that is asked of the driver once and then goes round.
//!
//! Everything runs on one stream, in the order in which it was submitted. So a block may be handed out again as soon as
//! the tensor it belonged to is gone, although the GPU may not have come to its last use: the new owner's work comes
//! later on the same stream. Asking the driver for memory would make the stream wait.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::sys::driver::DevicePtr;
use kiln_base::lock;

/// Where blocks come from.
pub(crate) trait Source {
    /// New memory, or `None` when there is no more.
    fn take(&self, bytes: usize) -> Option<DevicePtr>;
    /// Memory that nothing uses any more. The source waits for the work that did.
    fn give(&self, at: DevicePtr);
}

/// Blocks in reserve.
#[derive(Default)]
pub(crate) struct Arena {
    state: Mutex<State>,
    /// The most that is ever held.
    limit: Option<usize>,
}

#[derive(Default)]
struct State {
    /// Free blocks by size.
    free: BTreeMap<usize, Vec<DevicePtr>>,
    held: usize,
    peak: usize,
}

/// A block is larger than asked for, so that requests of about one size share blocks.
fn rounded(bytes: usize) -> usize {
    let step = match bytes {
        0..0x10_0000 => 512,
        0x10_0000..0x400_0000 => 0x1_0000,
        _ => 0x20_0000,
    };
    bytes.next_multiple_of(step)
}

impl Arena {
    /// One that never holds more than so many bytes.
    pub fn new(limit: Option<usize>) -> Arena {
        Arena { limit, ..Arena::default() }
    }

    /// A block of at least that size, and its size.
    pub fn take(&self, source: &impl Source, bytes: usize) -> Option<(DevicePtr, usize)> {
        self.take_gently(source, bytes).or_else(|| {
            lock(&self.state).release(source);
            self.take_gently(source, bytes)
        })
    }

    /// The same; but where the source has no more, the reserve is not given back to it.
    pub fn take_gently(&self, source: &impl Source, bytes: usize) -> Option<(DevicePtr, usize)> {
        let size = rounded(bytes.max(1));
        let mut state = lock(&self.state);
        // A somewhat larger block is better than none; a much larger one will be missed elsewhere.
        let fit = state.free.range(size..=size + size / 4).next().map(|(&size, _)| size);
        if let Some(size) = fit
            && let Some(blocks) = state.free.get_mut(&size)
            && let Some(at) = blocks.pop()
        {
            if blocks.is_empty() {
                state.free.remove(&size);
            }
            return Some((at, size));
        }
        let allowed = self.limit.is_none_or(|limit| state.held + size <= limit);
        let at = if allowed { source.take(size)? } else { return None };
        state.held += size;
        state.peak = state.peak.max(state.held);
        Some((at, size))
    }

    /// Takes a block back.
    pub fn give(&self, at: DevicePtr, size: usize) {
        let mut state = lock(&self.state);
        state.free.entry(size).or_default().push(at);
    }

    /// Gives all free blocks back to the source.
    pub fn release(&self, source: &impl Source) {
        let mut state = lock(&self.state);
        state.release(source);
        state.peak = state.held;
    }

    /// Bytes that may still be handed out, where the source has `free` more: the reserve counts, and so does the limit.
    pub fn room(&self, free: usize) -> usize {
        let state = lock(&self.state);
        let reserve: usize = state.free.iter().map(|(size, blocks)| size * blocks.len()).sum();
        let allowed = self.limit.map_or(usize::MAX, |limit| limit.saturating_sub(state.held - reserve));
        free.saturating_add(reserve).min(allowed)
    }

    /// Bytes that came from the source and were not given back.
    pub fn held(&self) -> usize {
        lock(&self.state).held
    }

    /// The most that was held at once.
    pub fn peak(&self) -> usize {
        lock(&self.state).peak
    }
}

impl State {
    fn release(&mut self, source: &impl Source) {
        for (size, blocks) in std::mem::take(&mut self.free) {
            for at in blocks {
                source.give(at);
                self.held -= size;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A source of limited memory that counts.
    #[derive(Default)]
    struct Counted(RefCell<Counts>);

    #[derive(Default)]
    struct Counts {
        asked: usize,
        /// Addresses and sizes that were not given back.
        taken: Vec<(DevicePtr, usize)>,
    }

    const LIMIT: usize = 10 << 20;

    impl Source for Counted {
        fn take(&self, bytes: usize) -> Option<DevicePtr> {
            let mut counts = self.0.borrow_mut();
            let used: usize = counts.taken.iter().map(|(_, size)| size).sum();
            if used + bytes > LIMIT {
                return None;
            }
            counts.asked += 1;
            let at = (counts.asked as DevicePtr) << 30;
            counts.taken.push((at, bytes));
            Some(at)
        }

        fn give(&self, at: DevicePtr) {
            self.0.borrow_mut().taken.retain(|&(there, _)| there != at);
        }
    }

    #[test]
    fn a_loop_asks_the_source_only_the_first_time() {
        let (arena, source) = (Arena::default(), Counted::default());
        for _ in 0..100 {
            let a = arena.take(&source, 3000).unwrap();
            let b = arena.take(&source, 70_000).unwrap();
            arena.give(a.0, a.1);
            arena.give(b.0, b.1);
        }
        assert_eq!(source.0.borrow().asked, 2);
    }

    #[test]
    fn two_owners_never_share_a_block() {
        let (arena, source) = (Arena::default(), Counted::default());
        let a = arena.take(&source, 512).unwrap();
        let b = arena.take(&source, 512).unwrap();
        assert_ne!(a.0, b.0);
        arena.give(a.0, a.1);
        let c = arena.take(&source, 500).unwrap();
        let d = arena.take(&source, 500).unwrap();
        assert!(c.0 == a.0 && d.0 != a.0 && d.0 != b.0);
    }

    #[test]
    fn a_small_request_does_not_take_a_large_block() {
        let (arena, source) = (Arena::default(), Counted::default());
        let large = arena.take(&source, 4 << 20).unwrap();
        arena.give(large.0, large.1);
        let small = arena.take(&source, 1024).unwrap();
        assert_ne!(small.0, large.0);
        assert_eq!(arena.take(&source, (4 << 20) - 70_000).unwrap().0, large.0);
    }

    #[test]
    fn the_reserve_is_given_back_before_memory_is_said_to_be_out() {
        let (arena, source) = (Arena::default(), Counted::default());
        let big = arena.take(&source, 6 << 20).unwrap();
        arena.give(big.0, big.1);
        let other = arena.take(&source, 9 << 20).unwrap();
        assert_eq!(arena.held(), other.1);
        assert_eq!(arena.take(&source, 4 << 20), None);
    }

    #[test]
    fn no_more_is_held_than_the_limit_allows() {
        let (arena, source) = (Arena::new(Some(5 << 20)), Counted::default());
        let four = arena.take(&source, 4 << 20).unwrap();
        assert_eq!(arena.take(&source, 2 << 20), None);
        arena.give(four.0, four.1);
        assert!(arena.take(&source, 2 << 20).is_some());
        assert_eq!((arena.held(), arena.peak()), (2 << 20, 4 << 20));
    }

    #[test]
    fn what_lies_in_reserve_is_room_but_never_beyond_the_limit() {
        let (free, limited) = (Arena::default(), Arena::new(Some(5 << 20)));
        for (arena, after) in [(&free, 10 << 20), (&limited, 4 << 20)] {
            let source = Counted::default();
            let kept = arena.take(&source, 1 << 20).unwrap();
            let given = arena.take(&source, 3 << 20).unwrap();
            assert_eq!(arena.room(7 << 20), after - (3 << 20));
            arena.give(given.0, given.1);
            assert_eq!(arena.room(7 << 20), after);
            assert_eq!(kept.1, 1 << 20);
        }
    }

    #[test]
    fn blocks_are_never_smaller_than_asked_for() {
        for bytes in [0, 1, 511, 512, 513, 0xf_ffff, 0x10_0001, 0x3ff_ffff, 0x400_0001] {
            assert!(rounded(bytes) >= bytes);
            assert!(rounded(bytes) <= bytes + bytes / 8 + 512, "{bytes}");
        }
    }
}

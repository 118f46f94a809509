//! The ring buffer's bookkeeping: which weights occupy which slots, and which weight comes next. Pure logic, no GPU calls.

use std::collections::HashMap;

/// Id of a streamed weight.
pub(crate) type WeightId = usize;

/// Alignment of slots, in bytes.
const ALIGNMENT: usize = 512;

/// A ring buffer of weights.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    capacity: usize,
    head: usize,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    id: WeightId,
    start: usize,
    size: usize,
    /// Prefetched and not used yet; must not be evicted.
    pending: bool,
}

/// Offset for a new weight, and the weights it evicts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub start: usize,
    pub evicted: Vec<WeightId>,
}

impl Ring {
    pub fn new(capacity: usize) -> Ring {
        Ring { capacity, ..Ring::default() }
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Rounds a size up to the alignment.
    pub fn round_up(bytes: usize) -> usize {
        bytes.next_multiple_of(ALIGNMENT)
    }

    /// Offset of a weight, if it is in the ring.
    pub fn start(&self, id: WeightId) -> Option<usize> {
        self.slots.iter().find(|slot| slot.id == id).map(|slot| slot.start)
    }

    /// Places a weight that is not in the ring; `None` if that would evict a pending one.
    pub fn place(&mut self, id: WeightId, bytes: usize) -> Option<Placement> {
        let size = Ring::round_up(bytes);
        if size > self.capacity {
            return None;
        }
        let start = if self.head + size > self.capacity { 0 } else { self.head };
        let overlaps = |slot: &Slot| slot.start < start + size && start < slot.start + slot.size;
        if self.slots.iter().any(|slot| slot.pending && overlaps(slot)) {
            return None;
        }
        let evicted = self.slots.iter().filter(|slot| overlaps(slot)).map(|slot| slot.id).collect();
        self.slots.retain(|slot| !overlaps(slot));
        self.slots.push(Slot { id, start, size, pending: true });
        self.head = start + size;
        Some(Placement { start, evicted })
    }

    /// Marks a weight as used; it can be evicted.
    pub fn mark_used(&mut self, id: WeightId) {
        self.set_pending(id, false);
    }

    /// Marks a weight as needed soon.
    pub fn mark_pending(&mut self, id: WeightId) {
        self.set_pending(id, true);
    }

    /// Drops all predictions: another weight than predicted was used, so any slot can be evicted.
    pub fn clear_pending(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.pending = false);
    }

    pub fn remove(&mut self, id: WeightId) {
        self.slots.retain(|slot| slot.id != id);
    }

    fn set_pending(&mut self, id: WeightId, pending: bool) {
        self.slots.iter_mut().filter(|slot| slot.id == id).for_each(|slot| slot.pending = pending);
    }
}

/// The predicted order of use: that of last time, and at first the order of creation.
#[derive(Debug, Default)]
pub(crate) struct UseOrder {
    next: HashMap<WeightId, WeightId>,
    last: Option<WeightId>,
}

impl UseOrder {
    pub fn record(&mut self, id: WeightId) {
        if let Some(last) = self.last.replace(id).filter(|&last| last != id) {
            self.next.insert(last, id);
        }
    }

    pub fn next_after(&self, id: WeightId) -> WeightId {
        self.next.get(&id).copied().unwrap_or(id + 1)
    }

    /// Removes a weight; its predecessor is followed by its successor.
    pub fn remove(&mut self, id: WeightId) {
        let successor = self.next.remove(&id);
        self.last = self.last.filter(|&last| last != id);
        for next in self.next.values_mut().filter(|next| **next == id) {
            *next = successor.unwrap_or(id + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses weights as the streamer does; returns how many had to be waited for.
    fn stalls(ring: &mut Ring, order: &mut UseOrder, sizes: &[usize], uses: &[WeightId]) -> usize {
        let mut stalls = 0;
        for &id in uses {
            order.record(id);
            if ring.start(id).is_none() {
                stalls += 1;
                ring.clear_pending();
                ring.place(id, sizes[id]).unwrap();
            }
            ring.mark_used(id);
            let mut next = order.next_after(id);
            for _ in 0..sizes.len() {
                if next == id || next >= sizes.len() {
                    break;
                }
                match ring.start(next) {
                    Some(_) => ring.mark_pending(next),
                    None if ring.place(next, sizes[next]).is_none() => break,
                    None => {}
                }
                next = order.next_after(next);
            }
        }
        stalls
    }

    #[test]
    fn every_weight_but_the_first_is_prefetched() {
        let sizes = [170, 75, 170, 75, 170, 75, 170, 75].map(|size| size << 10);
        let (mut ring, mut order) = (Ring::new(3 * (170 << 10)), UseOrder::default());
        assert_eq!(stalls(&mut ring, &mut order, &sizes, &[0, 1, 2, 3, 4, 5, 6, 7]), 1);
        // The wrap-around is unknown once, then predicted.
        assert_eq!(stalls(&mut ring, &mut order, &sizes, &[0, 1, 2, 3, 4, 5, 6, 7]), 1);
        assert_eq!(stalls(&mut ring, &mut order, &sizes, &[0, 1, 2, 3, 4, 5, 6, 7].repeat(5)), 0);
    }

    #[test]
    fn another_order_is_learned() {
        let sizes = [1 << 10; 6];
        let (mut ring, mut order) = (Ring::new(3 << 10), UseOrder::default());
        stalls(&mut ring, &mut order, &sizes, &[3, 1, 4, 0, 5, 2].repeat(2));
        assert_eq!(stalls(&mut ring, &mut order, &sizes, &[3, 1, 4, 0, 5, 2].repeat(3)), 0);
    }

    #[test]
    fn weights_that_fit_are_copied_once() {
        let (mut ring, mut order) = (Ring::new(8 << 10), UseOrder::default());
        assert_eq!(stalls(&mut ring, &mut order, &[1 << 10; 8], &[0, 1, 2, 3, 4, 5, 6, 7].repeat(4)), 1);
        assert!((0..8).all(|id| ring.start(id).is_some()));
    }

    #[test]
    fn slots_never_overlap_and_pending_ones_stay() {
        let mut ring = Ring::new(4 << 10);
        assert_eq!(ring.place(0, 3 << 10), Some(Placement { start: 0, evicted: vec![] }));
        assert_eq!(ring.place(1, 2 << 10), None);
        ring.mark_used(0);
        assert_eq!(ring.place(1, 2 << 10), Some(Placement { start: 0, evicted: vec![0] }));
        assert_eq!(ring.place(2, 1000), Some(Placement { start: 2 << 10, evicted: vec![] }));
        assert_eq!(ring.place(3, 9 << 10), None);
        ring.clear_pending();
        assert_eq!(ring.place(3, 4 << 10), Some(Placement { start: 0, evicted: vec![1, 2] }));
        ring.remove(3);
        assert_eq!(ring.start(3), None);
    }

    #[test]
    fn a_removed_weight_is_not_predicted() {
        let mut order = UseOrder::default();
        [0, 1, 2, 0].into_iter().for_each(|id| order.record(id));
        order.remove(1);
        assert_eq!((order.next_after(0), order.next_after(2)), (2, 0));
    }
}

//! Which weights lie in the part of the device's memory that they take turns in, and which come next. No GPU is asked: this
//! only decides.

use std::collections::HashMap;

/// Number of a weight that is brought in when it is used.
pub(crate) type Id = usize;

/// Bytes to which places are rounded.
const STEP: usize = 512;

/// A run of memory that is filled round and round.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    capacity: usize,
    head: usize,
    there: Vec<Held>,
}

#[derive(Debug)]
struct Held {
    id: Id,
    start: usize,
    size: usize,
    /// Whether its use is still to come.
    awaited: bool,
}

/// Where a weight goes, and whose places that takes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub start: usize,
    pub gone: Vec<Id>,
}

impl Ring {
    pub fn new(capacity: usize) -> Ring {
        Ring { capacity, ..Ring::default() }
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// What `bytes` take here.
    pub fn rounded(bytes: usize) -> usize {
        bytes.next_multiple_of(STEP)
    }

    /// Where a weight begins, if it is there.
    pub fn start(&self, id: Id) -> Option<usize> {
        self.there.iter().find(|held| held.id == id).map(|held| held.start)
    }

    /// A place for a weight that is not there; `None` when that would take the place of one that is awaited.
    pub fn place(&mut self, id: Id, bytes: usize) -> Option<Placed> {
        let size = Ring::rounded(bytes);
        if size > self.capacity {
            return None;
        }
        let start = if self.head + size > self.capacity { 0 } else { self.head };
        let meets = |held: &Held| held.start < start + size && start < held.start + held.size;
        if self.there.iter().any(|held| held.awaited && meets(held)) {
            return None;
        }
        let gone = self.there.iter().filter(|held| meets(held)).map(|held| held.id).collect();
        self.there.retain(|held| !meets(held));
        self.there.push(Held { id, start, size, awaited: true });
        self.head = start + size;
        Some(Placed { start, gone })
    }

    /// It has been used.
    pub fn used(&mut self, id: Id) {
        self.set(id, false);
    }

    /// It will be used soon.
    pub fn await_use(&mut self, id: Id) {
        self.set(id, true);
    }

    /// What was awaited did not come: nothing has to stay.
    pub fn surprise(&mut self) {
        self.there.iter_mut().for_each(|held| held.awaited = false);
    }

    pub fn forget(&mut self, id: Id) {
        self.there.retain(|held| held.id != id);
    }

    fn set(&mut self, id: Id, awaited: bool) {
        self.there.iter_mut().filter(|held| held.id == id).for_each(|held| held.awaited = awaited);
    }
}

/// In which order weights are used: as last time, and the first time as they were made.
#[derive(Debug, Default)]
pub(crate) struct Order {
    next: HashMap<Id, Id>,
    last: Option<Id>,
}

impl Order {
    pub fn used(&mut self, id: Id) {
        if let Some(last) = self.last.replace(id).filter(|&last| last != id) {
            self.next.insert(last, id);
        }
    }

    pub fn after(&self, id: Id) -> Id {
        self.next.get(&id).copied().unwrap_or(id + 1)
    }

    /// A weight that is no more: its neighbours meet.
    pub fn forget(&mut self, id: Id) {
        let after = self.next.remove(&id);
        self.last = self.last.filter(|&last| last != id);
        for next in self.next.values_mut().filter(|next| **next == id) {
            *next = after.unwrap_or(id + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses weights as the streamer does; how many copies were made while nothing could be computed.
    fn waits(ring: &mut Ring, order: &mut Order, sizes: &[usize], uses: &[Id]) -> usize {
        let mut waits = 0;
        for &id in uses {
            order.used(id);
            if ring.start(id).is_none() {
                waits += 1;
                ring.surprise();
                ring.place(id, sizes[id]).unwrap();
            }
            ring.used(id);
            let mut next = order.after(id);
            for _ in 0..sizes.len() {
                if next == id || next >= sizes.len() {
                    break;
                }
                match ring.start(next) {
                    Some(_) => ring.await_use(next),
                    None if ring.place(next, sizes[next]).is_none() => break,
                    None => {}
                }
                next = order.after(next);
            }
        }
        waits
    }

    #[test]
    fn every_weight_but_the_first_is_there_before_its_use() {
        let sizes = [170, 75, 170, 75, 170, 75, 170, 75].map(|size| size << 10);
        let (mut ring, mut order) = (Ring::new(3 * (170 << 10)), Order::default());
        assert_eq!(waits(&mut ring, &mut order, &sizes, &[0, 1, 2, 3, 4, 5, 6, 7]), 1);
        // Nobody knew that it begins again; from then on it is known.
        assert_eq!(waits(&mut ring, &mut order, &sizes, &[0, 1, 2, 3, 4, 5, 6, 7]), 1);
        assert_eq!(waits(&mut ring, &mut order, &sizes, &[0, 1, 2, 3, 4, 5, 6, 7].repeat(5)), 0);
    }

    #[test]
    fn another_order_is_learnt() {
        let sizes = [1 << 10; 6];
        let (mut ring, mut order) = (Ring::new(3 << 10), Order::default());
        waits(&mut ring, &mut order, &sizes, &[3, 1, 4, 0, 5, 2].repeat(2));
        assert_eq!(waits(&mut ring, &mut order, &sizes, &[3, 1, 4, 0, 5, 2].repeat(3)), 0);
    }

    #[test]
    fn what_fits_is_copied_once() {
        let (mut ring, mut order) = (Ring::new(8 << 10), Order::default());
        assert_eq!(waits(&mut ring, &mut order, &[1 << 10; 8], &[0, 1, 2, 3, 4, 5, 6, 7].repeat(4)), 1);
        assert!((0..8).all(|id| ring.start(id).is_some()));
    }

    #[test]
    fn places_never_overlap_and_what_is_awaited_stays() {
        let mut ring = Ring::new(4 << 10);
        assert_eq!(ring.place(0, 3 << 10), Some(Placed { start: 0, gone: vec![] }));
        assert_eq!(ring.place(1, 2 << 10), None);
        ring.used(0);
        assert_eq!(ring.place(1, 2 << 10), Some(Placed { start: 0, gone: vec![0] }));
        assert_eq!(ring.place(2, 1000), Some(Placed { start: 2 << 10, gone: vec![] }));
        assert_eq!(ring.place(3, 9 << 10), None);
        ring.surprise();
        assert_eq!(ring.place(3, 4 << 10), Some(Placed { start: 0, gone: vec![1, 2] }));
        ring.forget(3);
        assert_eq!(ring.start(3), None);
    }

    #[test]
    fn a_weight_that_is_gone_is_not_awaited() {
        let mut order = Order::default();
        [0, 1, 2, 0].into_iter().for_each(|id| order.used(id));
        order.forget(1);
        assert_eq!((order.after(0), order.after(2)), (2, 0));
    }
}

//! Memory for decoding images: what all decoders together may hold at one time.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;

/// How many decoders may wait for memory; more are refused at once, as each blocks a thread.
const MAX_WAITING: usize = 32;
/// How long a decoder of a request waits.
const PATIENCE: Duration = Duration::from_secs(20);

/// The decoders were busy for too long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Busy;

/// The memory that decoders may hold.
pub(crate) struct DecodeBudget {
    capacity: u64,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    used: u64,
    peak: u64,
    waiting: usize,
}

impl DecodeBudget {
    pub(crate) fn new(capacity: u64) -> DecodeBudget {
        DecodeBudget { capacity, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Reserves memory for a request; fails when that takes long or many others wait.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<DecodePermit<'_>, Busy> {
        self.reserve_until(bytes, Some(Instant::now() + PATIENCE))
    }

    /// Reserves memory, however long that takes: for jobs that were accepted. Decoders always end, so this does, too.
    pub(crate) fn reserve_patiently(&self, bytes: u64) -> DecodePermit<'_> {
        let bytes = bytes.min(self.capacity);
        self.reserve_until(bytes, None).unwrap_or(DecodePermit { budget: self, bytes: 0 })
    }

    fn reserve_until(&self, bytes: u64, deadline: Option<Instant>) -> Result<DecodePermit<'_>, Busy> {
        // One that is larger than all memory is decoded alone.
        let bytes = bytes.min(self.capacity);
        let mut state = lock(&self.state);
        if state.used + bytes > self.capacity && deadline.is_some() && state.waiting >= MAX_WAITING {
            return Err(Busy);
        }
        state.waiting += 1;
        while state.used + bytes > self.capacity {
            state = match deadline {
                None => kiln_base::wait(&self.freed, state),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        state.waiting -= 1;
                        return Err(Busy);
                    }
                    self.freed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
        }
        state.waiting -= 1;
        state.used += bytes;
        state.peak = state.peak.max(state.used);
        Ok(DecodePermit { budget: self, bytes })
    }

    /// The most memory that was reserved at one time.
    pub(crate) fn peak(&self) -> u64 {
        lock(&self.state).peak
    }
}

/// Memory for one decoder; dropping it gives the memory back.
pub(crate) struct DecodePermit<'a> {
    budget: &'a DecodeBudget,
    bytes: u64,
}

impl Drop for DecodePermit<'_> {
    fn drop(&mut self) {
        lock(&self.budget.state).used -= self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoders_together_stay_within_the_budget() {
        let budget = DecodeBudget::new(100);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let _permit = budget.reserve(40).unwrap();
                    assert!(lock(&budget.state).used <= 100);
                });
            }
            scope.spawn(|| drop(budget.reserve_patiently(1000)));
        });
        assert!(budget.peak() <= 100 && lock(&budget.state).used == 0);
    }

    #[test]
    fn waiting_ends_at_the_deadline_and_the_line_is_short() {
        let budget = DecodeBudget::new(100);
        let _all = budget.reserve(100).unwrap();
        assert_eq!(budget.reserve_until(1, Some(Instant::now())).err(), Some(Busy));
        lock(&budget.state).waiting = MAX_WAITING;
        let start = Instant::now();
        assert_eq!(budget.reserve(1).err(), Some(Busy));
        assert!(start.elapsed() < PATIENCE / 2);
    }
}

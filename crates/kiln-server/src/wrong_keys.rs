//! Slows down clients that try wrong keys.
//!
//! Each wrong key from an address doubles the time until its answer. Only a few answers are delayed at one time: while
//! that many are, further keys from this address are not even compared. Keys that are right are never delayed.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;

/// Answers to one address that are delayed at one time.
const MAX_DELAYED: u32 = 4;
/// Longest delay, in multiples of the first one.
const MAX_FACTOR: u32 = 32;
/// How long wrong keys of an address are remembered.
const MEMORY: Duration = Duration::from_secs(600);
/// Addresses that are remembered; the oldest are forgotten.
const MAX_ADDRESSES: usize = 4096;

/// The addresses that sent wrong keys lately.
pub(crate) struct WrongKeys {
    /// The first delay.
    delay: Duration,
    addresses: Mutex<HashMap<IpAddr, Tries>>,
}

#[derive(Clone, Copy)]
struct Tries {
    wrong: u32,
    delayed: u32,
    last: Instant,
}

impl WrongKeys {
    pub(crate) fn new(delay: Duration) -> Arc<WrongKeys> {
        Arc::new(WrongKeys { delay, addresses: Mutex::default() })
    }

    /// Whether a key from this address may be compared now.
    pub(crate) fn may_try(&self, address: IpAddr) -> bool {
        lock(&self.addresses).get(&address).is_none_or(|tries| tries.delayed < MAX_DELAYED)
    }

    /// Counts a wrong key, and waits.
    pub(crate) async fn delay(self: &Arc<WrongKeys>, address: IpAddr) {
        let (time, _delayed) = self.count(address);
        tokio::time::sleep(time).await;
    }

    fn count(self: &Arc<WrongKeys>, address: IpAddr) -> (Duration, Delayed) {
        let mut addresses = lock(&self.addresses);
        let now = Instant::now();
        addresses.retain(|_, tries| tries.delayed > 0 || tries.last.elapsed() < MEMORY);
        if addresses.len() >= MAX_ADDRESSES && !addresses.contains_key(&address) {
            let oldest = addresses.iter().filter(|(_, tries)| tries.delayed == 0);
            let oldest = oldest.min_by_key(|(_, tries)| tries.last).map(|(address, _)| *address);
            oldest.map(|address| addresses.remove(&address));
        }
        let tries = addresses.entry(address).or_insert(Tries { wrong: 0, delayed: 0, last: now });
        let factor = 1_u32.checked_shl(tries.wrong).unwrap_or(MAX_FACTOR).clamp(1, MAX_FACTOR);
        (tries.wrong, tries.delayed, tries.last) = (tries.wrong + 1, tries.delayed + 1, now);
        (self.delay * factor, Delayed { all: Arc::clone(self), address })
    }
}

/// An answer that is delayed; dropped early if the client disconnects.
struct Delayed {
    all: Arc<WrongKeys>,
    address: IpAddr,
}

impl Drop for Delayed {
    fn drop(&mut self) {
        if let Some(tries) = lock(&self.all.addresses).get_mut(&self.address) {
            tries.delayed -= tries.delayed.min(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_and_only_a_few_run_at_one_time() {
        let wrong = WrongKeys::new(Duration::from_millis(100));
        let (ours, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let times: Vec<u128> = (0..8).map(|_| wrong.count(ours).0.as_millis()).collect();
        assert_eq!(times, [100, 200, 400, 800, 1600, 3200, 3200, 3200]);
        assert_eq!(wrong.count(other).0.as_millis(), 100);
        let delayed: Vec<_> = (0..MAX_DELAYED).map(|_| wrong.count(ours)).collect();
        assert!(!wrong.may_try(ours) && wrong.may_try(other));
        drop(delayed);
        assert!(wrong.may_try(ours));
    }

    #[test]
    fn the_memory_is_bounded() {
        let wrong = WrongKeys::new(Duration::ZERO);
        for n in 0..MAX_ADDRESSES as u32 + 100 {
            wrong.count(IpAddr::from(n.to_be_bytes()));
        }
        assert_eq!(lock(&wrong.addresses).len(), MAX_ADDRESSES);
    }
}

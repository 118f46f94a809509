//! Slows down clients that try wrong keys.
//!
//! Each wrong key from an address doubles the time until its answer. Only a few answers are delayed at one time: while
//! that many are, further keys from this address are not even compared. Keys that are right are never delayed, so
//! silence tells that a key is wrong: a client that hangs up early must wait for its next try all the same.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kiln_base::lock;

/// Answers to one address that are delayed at one time.
const MAX_DELAYED: usize = 4;
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

struct Tries {
    wrong: u32,
    /// When the answers that are delayed are due; at most [`MAX_DELAYED`].
    due: Vec<Instant>,
    last: Instant,
}

impl Tries {
    fn delayed(&self) -> usize {
        let now = Instant::now();
        self.due.iter().filter(|due| **due > now).count()
    }
}

impl WrongKeys {
    pub(crate) fn new(delay: Duration) -> WrongKeys {
        WrongKeys { delay, addresses: Mutex::default() }
    }

    /// Whether a key from this address may be compared now.
    pub(crate) fn may_try(&self, address: IpAddr) -> bool {
        lock(&self.addresses).get(&address).is_none_or(|tries| tries.delayed() < MAX_DELAYED)
    }

    /// Counts a wrong key, and waits.
    pub(crate) async fn delay(&self, address: IpAddr) {
        tokio::time::sleep(self.count(address)).await;
    }

    fn count(&self, address: IpAddr) -> Duration {
        let mut addresses = lock(&self.addresses);
        let now = Instant::now();
        addresses.retain(|_, tries| tries.last.elapsed() < MEMORY);
        if addresses.len() >= MAX_ADDRESSES && !addresses.contains_key(&address) {
            let oldest = addresses.iter().filter(|(_, tries)| tries.delayed() == 0);
            let oldest = oldest.min_by_key(|(_, tries)| tries.last).map(|(address, _)| *address);
            oldest.map(|address| addresses.remove(&address));
        }
        let tries = addresses.entry(address).or_insert(Tries { wrong: 0, due: Vec::new(), last: now });
        let factor = 1_u32.checked_shl(tries.wrong).unwrap_or(MAX_FACTOR).clamp(1, MAX_FACTOR);
        let delay = self.delay * factor;
        tries.due.retain(|due| *due > now);
        tries.due.push(now + delay);
        (tries.wrong, tries.last) = (tries.wrong.saturating_add(1), now);
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_and_only_a_few_run_at_one_time() {
        let wrong = WrongKeys::new(Duration::from_millis(100));
        let (ours, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let times: Vec<u128> = (0..8).map(|_| wrong.count(ours).as_millis()).collect();
        assert_eq!(times, [100, 200, 400, 800, 1600, 3200, 3200, 3200]);
        assert_eq!(wrong.count(other).as_millis(), 100);
        // Nobody waits for these answers any more, and they count all the same.
        assert!(!wrong.may_try(ours) && wrong.may_try(other));
        lock(&wrong.addresses).get_mut(&ours).unwrap().due.fill(Instant::now());
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

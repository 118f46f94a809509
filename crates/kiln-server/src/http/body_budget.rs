//! Memory for request bodies, reserved as their bytes arrive.
//!
//! Small bodies have a lane of their own, so that large uploads never keep a prompt waiting. No client gets more than
//! half of a lane. When a lane is full, the oldest body that is still arriving waits longest: the others give up first,
//! and at least one of them always gets through.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln_base::lock;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Largest body of the lane for small ones, in bytes.
pub(crate) const SMALL_BODY: usize = 64 << 10;
/// The oldest arriving body waits for memory this many times as long as the others.
const OLDEST_PATIENCE: u32 = 6;

/// Why memory was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// This client holds its share of the lane.
    ClientShare,
    /// The lane stayed full.
    Full,
}

/// The memory of both lanes.
pub(crate) struct BodyBudget {
    lanes: Mutex<Lanes>,
    freed: Notify,
    /// How long the oldest arriving body waits for memory.
    patience: Duration,
}

#[derive(Default)]
struct Lanes {
    small: Lane,
    large: Lane,
    next_number: u64,
    /// Numbers of the bodies that are still arriving.
    arriving: std::collections::BTreeSet<u64>,
}

#[derive(Default)]
struct Lane {
    capacity: usize,
    used: usize,
    by_client: HashMap<String, usize>,
}

impl Lane {
    fn take(&mut self, client: &str, bytes: usize) -> Result<(), Refused> {
        let own = self.by_client.get(client).copied().unwrap_or(0);
        if own + bytes > self.capacity / 2 {
            return Err(Refused::ClientShare);
        }
        if self.used + bytes > self.capacity {
            return Err(Refused::Full);
        }
        self.used += bytes;
        *self.by_client.entry(client.to_owned()).or_insert(0) += bytes;
        Ok(())
    }

    fn give_back(&mut self, client: &str, bytes: usize) {
        self.used -= bytes.min(self.used);
        if let Some(own) = self.by_client.get_mut(client) {
            *own -= bytes.min(*own);
            if *own == 0 {
                self.by_client.remove(client);
            }
        }
    }
}

impl BodyBudget {
    /// `small` and `large` are the bytes of the lanes; `patience` is how long the oldest arriving body waits.
    pub(crate) fn new(small: usize, large: usize, patience: Duration) -> Arc<BodyBudget> {
        let lane = |capacity| Lane { capacity, ..Lane::default() };
        let lanes = Lanes { small: lane(small), large: lane(large), ..Lanes::default() };
        Arc::new(BodyBudget { lanes: Mutex::new(lanes), freed: Notify::new(), patience })
    }

    /// A permit for a body of this client, of which nothing has arrived yet.
    pub(crate) fn start(self: &Arc<BodyBudget>, client: &str) -> BodyPermit {
        let mut lanes = lock(&self.lanes);
        let number = lanes.next_number;
        lanes.next_number += 1;
        lanes.arriving.insert(number);
        BodyPermit { budget: Arc::clone(self), client: client.to_owned(), number, small: 0, large: 0 }
    }
}

/// Memory reserved for one body; dropping it gives the memory back.
pub(crate) struct BodyPermit {
    budget: Arc<BodyBudget>,
    client: String,
    number: u64,
    small: usize,
    large: usize,
}

impl BodyPermit {
    /// Makes room for a body of `bytes` in total; waits for memory if there is none.
    pub(crate) async fn grow(&mut self, bytes: usize) -> Result<(), Refused> {
        let start = Instant::now();
        loop {
            let budget = Arc::clone(&self.budget);
            let freed = budget.freed.notified();
            let mut freed = std::pin::pin!(freed);
            // Listen before looking, so that no notification is lost in between.
            freed.as_mut().enable();
            let (refused, oldest) = {
                let mut lanes = lock(&budget.lanes);
                match self.try_grow(&mut lanes, bytes) {
                    Ok(()) => return Ok(()),
                    Err(refused) => (refused, lanes.arriving.first() == Some(&self.number)),
                }
            };
            let patience = if oldest { budget.patience } else { budget.patience / OLDEST_PATIENCE };
            if timeout_at(start + patience, freed).await.is_err() {
                return Err(refused);
            }
        }
    }

    fn try_grow(&mut self, lanes: &mut Lanes, bytes: usize) -> Result<(), Refused> {
        if bytes <= SMALL_BODY && self.large == 0 {
            let more = bytes.saturating_sub(self.small);
            lanes.small.take(&self.client, more)?;
            self.small += more;
            return Ok(());
        }
        let more = bytes.saturating_sub(self.large);
        lanes.large.take(&self.client, more)?;
        self.large += more;
        lanes.small.give_back(&self.client, std::mem::take(&mut self.small));
        Ok(())
    }

    /// The whole body is there.
    pub(crate) fn arrived(&self) {
        lock(&self.budget.lanes).arriving.remove(&self.number);
        self.budget.freed.notify_waiters();
    }
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        {
            let mut lanes = lock(&self.budget.lanes);
            lanes.arriving.remove(&self.number);
            lanes.small.give_back(&self.client, self.small);
            lanes.large.give_back(&self.client, self.large);
        }
        self.budget.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = 16 * SMALL_BODY;

    fn budget() -> Arc<BodyBudget> {
        BodyBudget::new(4 * SMALL_BODY, LARGE, Duration::from_millis(20))
    }

    #[tokio::test]
    async fn an_announced_body_takes_memory_only_as_it_arrives() {
        let budget = budget();
        let mut all: Vec<BodyPermit> = (0..100).map(|_| budget.start("a")).collect();
        assert_eq!(lock(&budget.lanes).large.used, 0);
        all[0].grow(LARGE / 2).await.unwrap();
        all[1].grow(100).await.unwrap();
        let used = || {
            let lanes = lock(&budget.lanes);
            (lanes.large.used, lanes.small.used)
        };
        assert_eq!(used(), (LARGE / 2, 100));
        assert_eq!(all[1].grow(SMALL_BODY + 1).await, Err(Refused::ClientShare));
        all.clear();
        let lanes = lock(&budget.lanes);
        assert_eq!((lanes.large.used, lanes.small.used, lanes.arriving.len()), (0, 0, 0));
        assert!(lanes.large.by_client.is_empty() && lanes.small.by_client.is_empty());
    }

    #[tokio::test]
    async fn a_client_gets_half_of_a_lane_and_small_bodies_pass_large_ones() {
        let budget = budget();
        let (mut a, mut b, mut c) = (budget.start("a"), budget.start("b"), budget.start("c"));
        a.grow(LARGE / 2).await.unwrap();
        assert_eq!(budget.start("a").grow(2 * SMALL_BODY).await, Err(Refused::ClientShare));
        b.grow(LARGE / 2).await.unwrap();
        assert_eq!(c.grow(2 * SMALL_BODY).await, Err(Refused::Full));
        c.grow(SMALL_BODY).await.unwrap();
        drop(b);
        c.grow(2 * SMALL_BODY).await.unwrap();
        assert_eq!(lock(&budget.lanes).small.used, 0, "a body that outgrows its lane leaves it");
    }

    #[tokio::test]
    async fn the_oldest_arriving_body_outlasts_the_others() {
        let budget = BodyBudget::new(SMALL_BODY, LARGE, Duration::from_secs(6));
        let (mut old, mut young, mut done) = (budget.start("a"), budget.start("b"), budget.start("c"));
        old.grow(LARGE / 4).await.unwrap();
        young.grow(LARGE / 4).await.unwrap();
        done.grow(LARGE / 2).await.unwrap();
        done.arrived();
        let impatient = async {
            let refused = young.grow(LARGE / 2).await;
            drop(young);
            refused
        };
        let (grown, refused) = tokio::join!(old.grow(LARGE / 2), impatient);
        assert_eq!((grown, refused), (Ok(()), Err(Refused::Full)));
    }
}

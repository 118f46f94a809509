//! Checks of images, one at a time: each decodes many on all processors.

use crate::jobs::error::{ErrorCode, JobError};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

use kiln_base::lock;

/// The most checks that run or wait; each holds a thread.
const MAX_CHECKS: usize = 4;

/// Lets one check run, and a few wait.
#[derive(Default)]
pub(super) struct CheckQueue {
    count: AtomicUsize,
    running: Mutex<()>,
}

impl CheckQueue {
    /// Waits for the turn; refused if too many wait already.
    pub(super) fn wait(&self) -> Result<CheckTurn<'_>, JobError> {
        let more = |count| (count < MAX_CHECKS).then_some(count + 1);
        if self.count.fetch_update(SeqCst, SeqCst, more).is_err() {
            let message = "the images of other trainings are being checked; try again later";
            return Err(JobError::new(ErrorCode::Busy, message));
        }
        // Counted from here on, and no longer when it is dropped.
        let count = Counted(&self.count);
        Ok(CheckTurn { _running: lock(&self.running), _count: count })
    }
}

/// The turn of a check, as long as this lives.
pub(super) struct CheckTurn<'q> {
    _running: MutexGuard<'q, ()>,
    _count: Counted<'q>,
}

struct Counted<'q>(&'q AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_check_runs_a_few_wait_and_more_are_refused() {
        let queue = CheckQueue::default();
        let first = queue.wait().unwrap();
        std::thread::scope(|scope| {
            let waiting: Vec<_> =
                (1..MAX_CHECKS).map(|_| scope.spawn(|| queue.wait().map(drop).is_ok())).collect();
            while queue.count.load(SeqCst) < MAX_CHECKS {
                std::thread::yield_now();
            }
            assert_eq!(queue.wait().map(drop).unwrap_err().code, ErrorCode::Busy);
            drop(first);
            assert!(waiting.into_iter().all(|thread| thread.join().unwrap()));
        });
        assert_eq!(queue.count.load(SeqCst), 0);
    }
}

//! Counts of the work done in this process, for tests that no work is done twice.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static DECODED: AtomicU64 = AtomicU64::new(0);
static RESAMPLED: AtomicU64 = AtomicU64::new(0);

/// Work on images that this process has done so far, on all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Images whose pixels were decoded, damaged ones included.
    pub decoded: u64,
    /// Images that were resampled. Resizing to the size that an image already has does not count.
    pub resampled: u64,
}

/// Returns the counts so far.
pub fn counters() -> Counters {
    Counters { decoded: DECODED.load(Relaxed), resampled: RESAMPLED.load(Relaxed) }
}

pub(crate) fn count_decoded() {
    DECODED.fetch_add(1, Relaxed);
}

pub(crate) fn count_resampled() {
    RESAMPLED.fetch_add(1, Relaxed);
}

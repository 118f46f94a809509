//! How much work was done in this process, so that tests can tell work that is done twice.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static DECODED: AtomicU64 = AtomicU64::new(0);
static RESAMPLED: AtomicU64 = AtomicU64::new(0);

/// Work on images that this process has done so far, on all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Images whose pixels were decoded, damaged ones included.
    pub decoded: u64,
    /// Images that were resampled. Asking for the size that an image has resamples nothing.
    pub resampled: u64,
}

/// What was counted so far.
pub fn counters() -> Counters {
    Counters { decoded: DECODED.load(Relaxed), resampled: RESAMPLED.load(Relaxed) }
}

pub(crate) fn count_decoded() {
    DECODED.fetch_add(1, Relaxed);
}

pub(crate) fn count_resampled() {
    RESAMPLED.fetch_add(1, Relaxed);
}

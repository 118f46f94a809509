//! The end of the interpreter: jobs that still run are cancelled, and it waits for their threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

static ENDING: AtomicBool = AtomicBool::new(false);
static RUNNING: AtomicUsize = AtomicUsize::new(0);
/// How long to wait for a step to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether the interpreter is shutting down; every job is then cancelled.
pub(crate) fn is_ending() -> bool {
    ENDING.load(SeqCst)
}

/// Counts a running job; dropped when it has ended.
pub(crate) struct Running(());

impl Running {
    pub fn new() -> Running {
        RUNNING.fetch_add(1, SeqCst);
        Running(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, SeqCst);
    }
}

/// Cancels all jobs and waits for them. The package calls it at exit.
#[pyfunction]
pub(crate) fn shutdown(py: Python<'_>) {
    ENDING.store(true, SeqCst);
    let start = Instant::now();
    py.detach(|| {
        while RUNNING.load(SeqCst) > 0 && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Forgets the jobs of the parent process, whose threads a forked child does not have.
#[pyfunction]
pub(crate) fn after_fork() {
    RUNNING.store(0, SeqCst);
}

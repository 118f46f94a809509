//! The memory of this process while something runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two looks: short against the work that needs much memory, long against the look itself.
const PAUSE: Duration = Duration::from_millis(10);

/// Memory of this process that is no mapped file, in bytes; known on Linux only.
pub fn own() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Watches from its making to [`Watch::peak`].
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Option<u64>>,
}

impl Watch {
    pub fn start() -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peak = own()?;
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(PAUSE);
                peak = peak.max(own()?);
            }
            Some(peak)
        });
        Watch { stop, thread }
    }

    /// The most there was.
    pub fn peak(self) -> Option<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().flatten()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_came_and_went_is_seen() {
        let before = own().unwrap();
        let watch = Watch::start();
        let block = vec![1u8; 64 << 20];
        std::thread::sleep(10 * PAUSE);
        drop(std::hint::black_box(block));
        let peak = watch.peak().unwrap();
        assert!(peak >= before + (48 << 20), "{before} {peak}");
    }
}

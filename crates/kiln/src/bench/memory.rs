//! Peak memory of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval between samples: short against the work that needs much memory, long against a sample.
const INTERVAL: Duration = Duration::from_millis(10);

/// Returns the process's memory without mapped files, in bytes; Linux only.
pub fn anonymous_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Samples the process's memory on a thread until [`MemorySampler::peak`].
pub struct MemorySampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Option<u64>>,
}

impl MemorySampler {
    pub fn start() -> MemorySampler {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peak = anonymous_memory()?;
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(INTERVAL);
                peak = peak.max(anonymous_memory()?);
            }
            Some(peak)
        });
        MemorySampler { stop, thread }
    }

    /// Stops sampling and returns the peak.
    pub fn peak(self) -> Option<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().flatten()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_peak_includes_freed_memory() {
        let before = anonymous_memory().unwrap();
        let sampler = MemorySampler::start();
        let block = vec![1u8; 64 << 20];
        std::thread::sleep(10 * INTERVAL);
        drop(std::hint::black_box(block));
        let peak = sampler.peak().unwrap();
        assert!(peak >= before + (48 << 20), "{before} {peak}");
    }
}

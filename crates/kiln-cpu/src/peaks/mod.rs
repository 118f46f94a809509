//! The peak rates of this machine: multiply-adds from registers alone, and memory bandwidth.
//!
//! Kernels are compared with these ceilings. All threads work at the same time, as they do in kernels, because a
//! processor's clock falls with the number of busy cores.
//! Measure on an idle machine, and alternate between versions: another program's tiles on the other hyperthread
//! halve the tiles' rate. Zeros multiply a fifth faster than other values.

#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::parallel::Pool;

/// The duration of one measurement, and the number of them. The median is taken, because the clock of a shared machine
/// jumps, and the best of many would be a rate that it holds only for a moment.
const WINDOW: Duration = Duration::from_millis(30);
const WINDOWS: usize = 7;
/// Bytes read or copied by all threads together: more than any cache holds.
const MEMORY_BYTES: usize = 256 << 20;

/// One peak rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Peak {
    /// What is measured, such as `AMX bf16`.
    pub name: &'static str,
    /// Operations (a multiply-add counts as two) or bytes per second, all threads together.
    pub rate: f64,
}

/// The peak rates of this machine; those of units that it lacks are absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Peaks {
    /// f32 multiply-adds in the widest vectors.
    pub fma_f32: Option<Peak>,
    /// bf16 products with f32 sums in vectors.
    pub vector_bf16: Option<Peak>,
    /// bf16 products with f32 sums in tiles.
    pub amx_bf16: Option<Peak>,
    /// int8 products with i32 sums in vectors.
    pub vector_int8: Option<Peak>,
    /// int8 products with i32 sums in tiles.
    pub amx_int8: Option<Peak>,
    /// Bytes read from memory.
    pub read: Option<Peak>,
    /// Bytes read and written by a copy, both counted.
    pub copy: Option<Peak>,
}

impl Peaks {
    /// Measures the rates on this many threads, which takes about two seconds. Empty if the threads can't be started.
    pub fn measure(threads: usize) -> Peaks {
        let Ok(pool) = Pool::new(Some(threads.max(1))) else { return Peaks::default() };
        let peaks = Peaks { read: Some(read(&pool)), copy: Some(copy(&pool)), ..Peaks::default() };
        #[cfg(target_arch = "x86_64")]
        let peaks = x86::measure(&pool, peaks);
        peaks
    }

    /// All measured rates, products first.
    pub fn all(&self) -> impl Iterator<Item = &Peak> {
        let Peaks { fma_f32, vector_bf16, amx_bf16, vector_int8, amx_int8, read, copy } = self;
        [fma_f32, vector_bf16, amx_bf16, vector_int8, amx_int8, read, copy].into_iter().flatten()
    }
}

/// The rate of some work on all threads at the same time. `make` makes a thread's closure, which does a small amount of
/// work and returns how much it was.
fn rate<W: FnMut() -> f64>(pool: &Pool, make: impl Fn(usize) -> W + Sync) -> f64 {
    let barrier = Barrier::new(pool.threads());
    let per_thread = pool.broadcast(|thread| {
        let mut work = make(thread);
        work();
        let mut rates = [0.0; WINDOWS];
        for rate in &mut rates {
            barrier.wait();
            let start = Instant::now();
            let mut done = 0.0;
            while start.elapsed() < WINDOW {
                done += work();
            }
            *rate = done / start.elapsed().as_secs_f64();
        }
        rates
    });
    let mut totals: Vec<f64> = (0..WINDOWS).map(|w| per_thread.iter().map(|rates| rates[w]).sum()).collect();
    totals.sort_by(f64::total_cmp);
    totals[WINDOWS / 2]
}

/// Words read or copied between two clock reads.
const CHUNK_WORDS: usize = 1 << 20;

fn read(pool: &Pool) -> Peak {
    let make = |thread: usize| {
        let data = vec![thread as u64 + 1; MEMORY_BYTES / 8 / pool.threads()];
        let mut at = 0;
        move || {
            let chunk = &data[at..(at + CHUNK_WORDS).min(data.len())];
            at = if at + CHUNK_WORDS < data.len() { at + CHUNK_WORDS } else { 0 };
            std::hint::black_box(sum(chunk));
            size_of_val(chunk) as f64
        }
    };
    Peak { name: "memory, read", rate: rate(pool, make) }
}

fn copy(pool: &Pool) -> Peak {
    let make = |thread: usize| {
        let from = vec![thread as u64 + 1; MEMORY_BYTES / 16 / pool.threads()];
        let mut to = vec![1u64; from.len()];
        let mut at = 0;
        move || {
            let range = at..(at + CHUNK_WORDS).min(from.len());
            at = if at + CHUNK_WORDS < from.len() { at + CHUNK_WORDS } else { 0 };
            to[range.clone()].copy_from_slice(&from[range.clone()]);
            std::hint::black_box(&mut to);
            2.0 * 8.0 * range.len() as f64
        }
    };
    Peak { name: "memory, copy", rate: rate(pool, make) }
}

fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        // SAFETY: the instructions were just detected.
        return unsafe { x86::sum(words) };
    }
    words.iter().fold(0, |sum, word| sum ^ word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_have_a_rate() {
        let pool = Pool::new(Some(2)).unwrap();
        assert!(rate(&pool, |_| || std::hint::black_box(1.0)) > 0.0);
    }

    #[test]
    fn every_unit_that_kernels_use_has_a_peak() {
        let peaks = Peaks::measure(1);
        assert!(peaks.all().all(|peak| peak.rate.is_finite() && peak.rate > 1e6), "{peaks:?}");
        assert!(peaks.read.is_some() && peaks.copy.is_some());
        let best = crate::Isa::best();
        assert_eq!(peaks.amx_bf16.is_some(), best == crate::Isa::Amx);
        assert_eq!(peaks.fma_f32.is_some(), best != crate::Isa::Portable);
    }
}

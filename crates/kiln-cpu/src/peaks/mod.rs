//! What this machine could do at best: multiply-adds from registers alone, and bytes through the memory.
//!
//! Kernels are judged against these ceilings. All threads work at once, as they do in kernels, because a chip's clock
//! falls with the number of its cores at work.

#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::Barrier;
use std::time::{Duration, Instant};

/// How long one rate is taken, and how many are: the middle one counts, because the clock of a shared machine jumps
/// and the best of many would be a rate that it holds for a moment.
const WINDOW: Duration = Duration::from_millis(30);
const WINDOWS: usize = 7;
/// Bytes that are read or copied, in all threads together: more than any cache holds.
const MEMORY: usize = 256 << 20;

/// One ceiling.
#[derive(Clone, Debug, PartialEq)]
pub struct Peak {
    /// What is measured, such as `AMX bf16`.
    pub name: &'static str,
    /// Operations (a multiply-add is two) or bytes each second, all threads together.
    pub rate: f64,
}

/// The ceilings of this machine; units it lacks are absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Peaks {
    /// f32 multiply-adds in the widest vectors there are.
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
    /// Measures them on so many threads; takes about two seconds.
    pub fn measure(threads: usize) -> Peaks {
        let threads = threads.max(1);
        let peaks = Peaks { read: Some(read(threads)), copy: Some(copy(threads)), ..Peaks::default() };
        #[cfg(target_arch = "x86_64")]
        let peaks = x86::measure(threads, peaks);
        peaks
    }

    /// All that were found, products first.
    pub fn all(&self) -> impl Iterator<Item = &Peak> {
        let Peaks { fma_f32, vector_bf16, amx_bf16, vector_int8, amx_int8, read, copy } = self;
        [fma_f32, vector_bf16, amx_bf16, vector_int8, amx_int8, read, copy].into_iter().flatten()
    }
}

/// The rate of `work`, which does a piece of work and says how much it was, on all threads at once. Each thread makes
/// its own with `make`.
fn rate<W: FnMut() -> f64>(threads: usize, make: impl Fn(usize) -> W + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let (barrier, make) = (&barrier, &make);
    let per_thread: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let start = |thread| {
            scope.spawn(move || {
                let mut work = make(thread);
                work();
                let mut rates = Vec::with_capacity(WINDOWS);
                for _ in 0..WINDOWS {
                    barrier.wait();
                    let start = Instant::now();
                    let mut done = 0.0;
                    while start.elapsed() < WINDOW {
                        done += work();
                    }
                    rates.push(done / start.elapsed().as_secs_f64());
                }
                rates
            })
        };
        let handles: Vec<_> = (0..threads).map(start).collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
    });
    let mut sums: Vec<f64> = (0..WINDOWS).map(|w| per_thread.iter().map(|rates| rates[w]).sum()).collect();
    sums.sort_by(f64::total_cmp);
    sums[WINDOWS / 2]
}

/// Words of a piece: small enough to look at the clock often.
const PIECE: usize = 1 << 20;

fn read(threads: usize) -> Peak {
    let make = |thread: usize| {
        let data = vec![thread as u64 + 1; MEMORY / 8 / threads];
        let mut at = 0;
        move || {
            let piece = &data[at..(at + PIECE).min(data.len())];
            at = if at + PIECE < data.len() { at + PIECE } else { 0 };
            std::hint::black_box(sum(piece));
            size_of_val(piece) as f64
        }
    };
    Peak { name: "memory, read", rate: rate(threads, make) }
}

fn copy(threads: usize) -> Peak {
    let make = |thread: usize| {
        let from = vec![thread as u64 + 1; MEMORY / 16 / threads];
        let mut to = vec![1u64; from.len()];
        let mut at = 0;
        move || {
            let range = at..(at + PIECE).min(from.len());
            at = if at + PIECE < from.len() { at + PIECE } else { 0 };
            to[range.clone()].copy_from_slice(&from[range.clone()]);
            std::hint::black_box(&mut to);
            2.0 * 8.0 * range.len() as f64
        }
    };
    Peak { name: "memory, copy", rate: rate(threads, make) }
}

fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        // SAFETY: the instructions were found.
        return unsafe { x86::sum(words) };
    }
    words.iter().fold(0, |sum, word| sum ^ word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_more_does_not_halve_the_rate_of_each() {
        let work = |_| || std::hint::black_box(1.0);
        assert!(rate(2, work) > 0.0);
    }

    #[test]
    fn what_the_kernels_use_has_a_ceiling() {
        let peaks = Peaks::measure(1);
        assert!(peaks.all().all(|peak| peak.rate.is_finite() && peak.rate > 1e6), "{peaks:?}");
        assert!(peaks.read.is_some() && peaks.copy.is_some());
        let best = crate::Isa::best();
        assert_eq!(peaks.amx_bf16.is_some(), best == crate::Isa::Amx);
        assert_eq!(peaks.fma_f32.is_some(), best != crate::Isa::Portable);
    }
}

//! The peak rates of this machine: multiply-adds from registers alone, and memory bandwidth.
//!
//! Kernels are compared with these ceilings. All threads work at the same time, as they do in kernels, because a
//! processor's clock falls with the number of busy cores.
//! Measure on an idle machine, and alternate between versions: another program's tiles on the other hyperthread
//! halve the tiles' rate. Zeros multiply a fifth faster than other values.

#[cfg(target_arch = "aarch64")]
mod neon;
mod rate;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use rate::{Peak, Peaks};

use rate::rate;

use crate::parallel::Pool;

/// Bytes read or copied by all threads together: more than any cache holds.
const MEMORY_BYTES: usize = 256 << 20;

impl Peaks {
    /// Measures the rates on this many threads, which takes about two seconds. Empty if the threads can't be started.
    pub fn measure(threads: usize) -> Peaks {
        let Ok(pool) = Pool::new(Some(threads.max(1))) else { return Peaks::default() };
        let peaks = Peaks { read: Some(read(&pool)), copy: Some(copy(&pool)), ..Peaks::default() };
        #[cfg(target_arch = "x86_64")]
        let peaks = x86::measure(&pool, peaks);
        #[cfg(target_arch = "aarch64")]
        let peaks = neon::measure(&pool, peaks);
        peaks
    }
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
        assert!(!best.multiplies_bf16() || peaks.amx_bf16.is_some() || peaks.vector_bf16.is_some());
    }
}

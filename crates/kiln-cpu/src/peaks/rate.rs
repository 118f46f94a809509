//! How a rate is measured, and the rates that are.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::parallel::Pool;

/// The duration of one measurement, and the number of them. The median is taken, because the clock of a shared machine
/// jumps, and the best of many would be a rate that it holds only for a moment.
const WINDOW: Duration = Duration::from_millis(30);
const WINDOWS: usize = 7;

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
    /// All measured rates, products first.
    pub fn all(&self) -> impl Iterator<Item = &Peak> {
        let Peaks { fma_f32, vector_bf16, amx_bf16, vector_int8, amx_int8, read, copy } = self;
        [fma_f32, vector_bf16, amx_bf16, vector_int8, amx_int8, read, copy].into_iter().flatten()
    }
}

/// The rate of some work on all threads at the same time. `make` makes a thread's closure, which does a small amount of
/// work and returns how much it was.
pub(super) fn rate<W: FnMut() -> f64>(pool: &Pool, make: impl Fn(usize) -> W + Sync) -> f64 {
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

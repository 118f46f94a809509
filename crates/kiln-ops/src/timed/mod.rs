//! A backend that measures another one: time, floating-point operations and bytes of every operation.
//! Measuring costs two reads of the clock per operation, and a wait on an asynchronous backend.

mod backend;
mod cost;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_tensor::{HostLinear, HostTensor, LoraDelta};

use crate::{Backend, Residency, Result};
use cost::{Cost, WeightCost, dims};
pub use cost::{TimedConv, TimedWeight};

/// A backend that measures the operations of another one. Results are those of the inner backend.
///
/// ```
/// use kiln_ops::{Backend, Reference, Residency, TimedBackend};
/// use kiln_tensor::{DType, HostLinear, HostTensor};
///
/// let b = TimedBackend::new(Reference::new());
/// let w = b.load_weight(HostLinear::dense(vec![HostTensor::zeros([5, 3])])?, Residency::Device)?;
/// let x = b.upload(&HostTensor::zeros([2, 3]), DType::F32)?;
/// b.timer().take();
/// b.linear(&x, &w)?;
/// let stats = b.timer().take();
/// assert_eq!((stats[0].op, stats[0].detail.as_str(), stats[0].flops), ("linear", "2 × 3 → 5", 60));
/// assert_eq!(stats[0].bytes, 4 * (2 * 3 + 5 * 3 + 2 * 5));
/// # Ok::<(), kiln_ops::Error>(())
/// ```
#[derive(Clone)]
pub struct TimedBackend<B> {
    inner: B,
    /// Shared by all clones.
    timer: Arc<OpTimer>,
}

/// The measurements of a [`TimedBackend`].
#[derive(Default)]
pub struct OpTimer {
    /// By operation and sizes.
    totals: Mutex<BTreeMap<(&'static str, String), Totals>>,
    paused: AtomicBool,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    calls: u64,
    time: Duration,
    flops: u64,
    bytes: u64,
}

/// All calls of one operation with arguments of one size.
#[derive(Clone, Debug, PartialEq)]
pub struct OpStats {
    /// The operation's name in [`Backend`].
    pub op: &'static str,
    /// The sizes of its arguments.
    pub detail: String,
    /// Number of calls.
    pub calls: u64,
    /// Total time.
    pub time: Duration,
    /// Multiplications and additions of matmuls, attention and convolutions; 0 for other operations.
    pub flops: u64,
    /// Bytes of arguments, weights and results, each once.
    pub bytes: u64,
}

impl OpTimer {
    /// Pauses or resumes measuring, which waits for every operation and so keeps an asynchronous backend from overlapping
    /// them.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Returns and clears the measurements, by operation and size.
    pub fn take(&self) -> Vec<OpStats> {
        let totals = std::mem::take(&mut *lock(&self.totals));
        let stats = |((op, detail), totals): ((&'static str, String), Totals)| {
            let Totals { calls, time, flops, bytes } = totals;
            OpStats { op, detail, calls, time, flops, bytes }
        };
        totals.into_iter().map(stats).collect()
    }

    fn add(&self, op: &'static str, time: Duration, (detail, cost): (String, Cost)) {
        let mut totals = lock(&self.totals);
        let total = totals.entry((op, detail)).or_default();
        total.calls += 1;
        total.time += time;
        total.flops += cost.flops;
        total.bytes += cost.bytes;
    }
}

impl<B: Backend> TimedBackend<B> {
    /// Wraps `inner` and starts measuring.
    pub fn new(inner: B) -> Self {
        TimedBackend { inner, timer: Arc::default() }
    }

    /// Wraps `inner`; nothing is measured until [`OpTimer::pause`] says so.
    pub fn paused(inner: B) -> Self {
        let timed = TimedBackend::new(inner);
        timed.timer.pause(true);
        timed
    }

    /// The inner backend.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// The measurements.
    pub fn timer(&self) -> &OpTimer {
        &self.timer
    }

    /// Runs `call` and times it unless paused; `describe` returns its sizes and cost.
    fn measure<T>(
        &self,
        op: &'static str,
        call: impl FnOnce(&B) -> Result<T>,
        describe: impl FnOnce(&T) -> (String, Cost),
    ) -> Result<T> {
        let start = self.start()?;
        let result = call(&self.inner)?;
        if let Some(start) = start {
            self.inner.synchronize()?;
            let time = start.elapsed();
            self.timer.add(op, time, describe(&result));
        }
        Ok(result)
    }

    /// The time now, or `None` while paused.
    fn start(&self) -> Result<Option<Instant>> {
        if self.timer.is_paused() {
            return Ok(None);
        }
        // Without this, an asynchronous backend would charge earlier operations to this one.
        self.inner.synchronize()?;
        Ok(Some(Instant::now()))
    }

    fn timed_load_weight(&self, linear: HostLinear, residency: Residency) -> Result<TimedWeight<B::Weight>> {
        let base = WeightCost::of_linear(&linear);
        let total = base.plus(WeightCost::of_deltas(linear.deltas()));
        let size = format!("{} × {}", linear.rows(), linear.cols());
        let describe = |_: &B::Weight| (size, Cost::memory(total.bytes));
        let inner = self.measure("load_weight", |b| b.load_weight(linear, residency), describe)?;
        Ok(TimedWeight { inner, base, total })
    }

    fn timed_with_deltas(
        &self,
        w: &TimedWeight<B::Weight>,
        deltas: Vec<LoraDelta>,
    ) -> Result<TimedWeight<B::Weight>> {
        let cost = WeightCost::of_deltas(&deltas);
        let describe = |_: &B::Weight| (String::new(), Cost::memory(cost.bytes));
        let inner = self.measure("with_deltas", |b| b.with_deltas(&w.inner, deltas), describe)?;
        Ok(TimedWeight { inner, base: w.base, total: w.base.plus(cost) })
    }

    fn timed_load_conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<TimedConv<B::Conv>> {
        let bytes = (kernel.bytes().len() + bias.map_or(0, |b| b.bytes().len())) as u64;
        let describe = |_: &B::Conv| (dims(kernel.shape()), Cost::memory(bytes));
        let inner = self.measure("load_conv", |b| b.load_conv(kernel, bias), describe)?;
        // The inner backend has checked that there are four.
        let size = kernel.shape().dims().try_into().unwrap_or_default();
        Ok(TimedConv { inner, bytes, size })
    }
}

//! A backend that measures another one: time, floating-point operations and bytes of every operation.
//! Measuring costs two reads of the clock per operation, and a wait on an asynchronous backend.

mod cost;
mod training;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape};

use crate::{
    Activation, AttentionMask, AttentionSpec, Backend, ConvGeometry, Error, Pending, Residency, Result,
    RopeTable, RowGroups, RunMode, Tensor, backend_methods,
};
use cost::{Argument as _, Cost, WeightCost, attended_pairs, bytes};

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

/// A weight and its cost.
pub struct TimedWeight<W> {
    inner: W,
    /// Without LoRA deltas.
    base: WeightCost,
    /// With LoRA deltas.
    total: WeightCost,
}

/// A convolution and its size.
pub struct TimedConv<C> {
    inner: C,
    bytes: u64,
    /// `[out, in, height, width]`.
    size: [usize; 4],
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

/// Such as `4608 × 3072`.
fn dims(shape: &Shape) -> String {
    shape.dims().iter().map(usize::to_string).collect::<Vec<_>>().join(" × ")
}

/// Sizes and cost of a matmul of the concatenated `xs`; `others` are the bytes of further arguments.
fn linear_cost<T: Tensor, W>(xs: &[&T], w: &TimedWeight<W>, others: u64, outputs: &[T]) -> (String, Cost) {
    let rows = xs.first().map_or(0, |x| x.shape().rows());
    let input: usize = xs.iter().map(|x| x.shape().last()).sum();
    let output: usize = outputs.iter().map(|y| y.shape().last()).sum();
    let bytes = bytes(xs.iter().copied()) + w.total.bytes + others + bytes(outputs);
    (format!("{rows} × {input} → {output}"), Cost { flops: 2 * rows as u64 * w.total.macs, bytes })
}

fn attention_cost<T: Tensor>([q, k, v]: [&[&T]; 3], spec: &AttentionSpec, out: &T) -> (String, Cost) {
    let keys: usize = k.iter().map(|k| k.shape().rows()).sum();
    let (queries, width) = (out.shape().rows(), out.shape().last());
    let mask = match spec.mask {
        AttentionMask::None => "",
        AttentionMask::Causal { .. } => ", causal",
        AttentionMask::Isolated { .. } => ", isolated",
    };
    let detail = format!("{queries} × {keys}, {} heads × {}{mask}", spec.heads, width / spec.heads.max(1));
    let flops = 4 * attended_pairs(queries, keys, &spec.mask) * width as u64;
    let inputs = q.iter().chain(k).chain(v).copied();
    (detail, Cost { flops, bytes: bytes(inputs) + bytes([out]) })
}

fn conv_cost<T: Tensor, C>(x: &T, conv: &TimedConv<C>, residual: Option<&T>, out: &T) -> (String, Cost) {
    let [channels, input, height, width] = conv.size;
    let pixels = out.shape().numel() / channels.max(1);
    let (rows, columns) = (out.shape().dims()[0], out.shape().dims()[1]);
    let cost = Cost {
        flops: 2 * (pixels * channels * input * height * width) as u64,
        bytes: bytes([x, out]) + bytes(residual) + conv.bytes,
    };
    (format!("{rows} × {columns}, {input} → {channels}, {height} × {width}"), cost)
}

/// Forwards a method to the inner backend and measures it. Only operations with a special cost have their own arm.
macro_rules! measured {
    // Methods without a cost.
    ($self:ident, numerics()) => { $self.inner.numerics() };
    ($self:ident, reads_host_weights()) => { $self.inner.reads_host_weights() };
    ($self:ident, max_batch_rows()) => { $self.inner.max_batch_rows() };
    ($self:ident, synchronize()) => { $self.inner.synchronize() };
    ($self:ident, fence()) => { $self.inner.fence() };

    // Loading: weights and convolutions are wrapped together with their cost.
    ($self:ident, load_weight($linear:ident, $residency:ident)) => {
        $self.timed_load_weight($linear, $residency)
    };
    ($self:ident, with_deltas($w:ident, $deltas:ident)) => { $self.timed_with_deltas($w, $deltas) };
    ($self:ident, load_conv($kernel:ident, $bias:ident)) => { $self.timed_load_conv($kernel, $bias) };

    // Copies between host and device.
    ($self:ident, upload($host:ident, $dtype:ident)) => {
        $self.measure("upload", |b| b.upload($host, $dtype), |y| {
            (dims(y.shape()), Cost::memory($host.bytes().len() as u64 + bytes([y])))
        })
    };
    ($self:ident, download($x:ident)) => {
        $self.measure("download", |b| b.download($x), |_| {
            (dims($x.shape()), Cost::memory(2 * bytes([$x])))
        })
    };
    ($self:ident, download_async($x:ident)) => {
        $self.measure("download", |b| b.download_async($x), |_| {
            (dims($x.shape()), Cost::memory(2 * bytes([$x])))
        })
    };
    ($self:ident, download_bytes($x:ident, $scale:ident, $shift:ident)) => {
        $self.measure("download_bytes", |b| b.download_bytes($x, $scale, $shift), |y| {
            (dims($x.shape()), Cost::memory(bytes([$x]) + y.len() as u64))
        })
    };
    ($self:ident, download_bytes_async($x:ident, $scale:ident, $shift:ident)) => {
        $self.measure("download_bytes", |b| b.download_bytes_async($x, $scale, $shift), |_| {
            (dims($x.shape()), Cost::memory(bytes([$x]) + $x.shape().numel() as u64))
        })
    };

    // Views, and casts to the dtype that a tensor already has, move nothing.
    ($self:ident, reshape($x:ident, $shape:ident)) => {
        $self.measure("reshape", |b| b.reshape($x, $shape), |y| (dims(y.shape()), Cost::default()))
    };
    ($self:ident, slice_rows($x:ident, $range:ident)) => {
        $self.measure("slice_rows", |b| b.slice_rows($x, $range), |y| (dims(y.shape()), Cost::default()))
    };
    ($self:ident, cast($x:ident, $dtype:ident)) => {
        $self.measure("cast", |b| b.cast($x, $dtype), |y| {
            (dims(y.shape()), Cost::memory(if $x.dtype() == $dtype { 0 } else { bytes([$x, y]) }))
        })
    };

    // Writes into a tensor.
    ($self:ident, write_rows($x:ident, $first:ident, $rows:ident)) => {
        $self.measure("write_rows", |b| b.write_rows($x, $first, $rows), |()| {
            (dims($rows.shape()), Cost::memory(2 * bytes([$rows])))
        })
    };

    // Operations with products.
    ($self:ident, linear($x:ident, $w:ident)) => {
        $self.measure("linear", |b| b.linear($x, &$w.inner), |y| {
            linear_cost(&[$x], $w, 0, std::slice::from_ref(y))
        })
    };
    ($self:ident, linear_split($x:ident, $w:ident, $widths:ident)) => {
        $self.measure("linear_split", |b| b.linear_split($x, &$w.inner, $widths), |ys| {
            linear_cost(&[$x], $w, 0, ys)
        })
    };
    ($self:ident, linear_gated_add($xs:ident, $w:ident, $gate:ident, $residual:ident)) => {{
        let others = bytes($gate.map(|(gate, _)| gate)) + bytes([$residual]);
        let call = |b: &B| b.linear_gated_add($xs, &$w.inner, $gate, $residual);
        $self.measure("linear_gated_add", call, |y| linear_cost($xs, $w, others, std::slice::from_ref(y)))
    }};
    ($self:ident, swiglu_gated_add($attn:ident, $gate_up:ident, $w:ident, $gate:ident, $residual:ident)) => {{
        let xs: Vec<_> = $attn.into_iter().chain([$gate_up]).collect();
        let others = bytes($gate.map(|(gate, _)| gate)) + bytes([$residual]);
        let call = |b: &B| b.swiglu_gated_add($attn, $gate_up, &$w.inner, $gate, $residual);
        $self.measure("swiglu_gated_add", call, |y| linear_cost(&xs, $w, others, std::slice::from_ref(y)))
    }};
    ($self:ident, ada_linear_split(
        $x:ident, $modulation:ident, $groups:ident, $eps:ident, $w:ident, $widths:ident
    )) => {{
        let call = |b: &B| b.ada_linear_split($x, $modulation, $groups, $eps, &$w.inner, $widths);
        $self.measure("ada_linear_split", call, |ys| linear_cost(&[$x], $w, bytes($modulation), ys))
    }};
    ($self:ident, attention($q:ident, $k:ident, $v:ident, $spec:ident)) => {
        $self.measure("attention", |b| b.attention($q, $k, $v, $spec), |y| {
            attention_cost([$q, $k, $v], $spec, y)
        })
    };
    ($self:ident, conv2d($x:ident, $conv:ident, $geometry:ident, $residual:ident)) => {
        $self.measure("conv2d", |b| b.conv2d($x, &$conv.inner, $geometry, $residual), |y| {
            conv_cost($x, $conv, $residual, y)
        })
    };

    // Two results.
    ($self:ident, qk_norm_rope($qk:ident, $weights:ident, $rope:ident, $eps:ident)) => {
        $self.measure("qk_norm_rope", |b| b.qk_norm_rope($qk, $weights, $rope, $eps), |[q, k]| {
            let detail = format!("{} × {} + {}", q.shape().rows(), q.shape().last(), k.shape().last());
            let weights = $weights.map_or(0, bytes);
            (detail, Cost::memory(bytes($qk) + weights + $rope.bytes() + bytes([q, k])))
        })
    };

    // All other operations read their arguments and write one tensor.
    ($self:ident, $op:ident($($argument:ident),*)) => {{
        let arguments = 0 $(+ $argument.bytes())*;
        $self.measure(stringify!($op), |b| b.$op($($argument),*), |y| {
            (dims(y.shape()), Cost::memory(arguments + bytes([y])))
        })
    }};
}

impl<B: Backend> Backend for TimedBackend<B> {
    type Tensor = B::Tensor;
    type Weight = TimedWeight<B::Weight>;
    type Conv = TimedConv<B::Conv>;
    type GraphCache = B::GraphCache;

    fn name(&self) -> String {
        self.inner.name()
    }

    // A replayed graph has no single operations, so it is used only while measuring is paused.
    fn replay<E: From<Error>>(
        &self,
        graphs: &B::GraphCache,
        key: &[usize],
        inputs: &[&B::Tensor],
        mut work: impl FnMut(&Self, RunMode, &[&B::Tensor]) -> Result<B::Tensor, E>,
    ) -> Result<B::Tensor, E> {
        if !self.timer.is_paused() {
            return work(self, RunMode::Execute, inputs);
        }
        self.inner.replay(graphs, key, inputs, |inner, mode, inputs| {
            let timed = TimedBackend { inner: inner.clone(), timer: Arc::clone(&self.timer) };
            work(&timed, mode, inputs)
        })
    }

    backend_methods!(required, measured);
    backend_methods!(provided, measured);
}

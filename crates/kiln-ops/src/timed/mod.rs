//! A backend that keeps count of what another one does.

mod work;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kiln_base::lock;
use kiln_tensor::{DType, Delta, HostTensor, LinearParts, Shape};

use crate::{
    Activation, AttentionSpec, Backend, ConvGeometry, Error, Groups, Later, Mask, Residency, Result,
    RopeTable, Run, Tensor as _,
};
use work::{Work, bytes};

/// Any backend, with the time and the work of every operation counted. Results are the backend's own.
///
/// ```
/// use kiln_ops::{Backend, Reference, Residency, Timed};
/// use kiln_tensor::{DType, HostTensor, LinearParts};
///
/// let b = Timed::new(Reference::new());
/// let w = b.weight(LinearParts::dense(vec![HostTensor::zeros([5, 3])])?, Residency::Device)?;
/// let x = b.upload(&HostTensor::zeros([2, 3]), DType::F32)?;
/// b.take();
/// b.linear(&x, &w)?;
/// let done = b.take();
/// assert_eq!((done[0].op, done[0].detail.as_str(), done[0].flops), ("linear", "2 × 3 → 5", 60));
/// assert_eq!(done[0].bytes, 4 * (2 * 3 + 5 * 3 + 2 * 5));
/// # Ok::<(), kiln_ops::Error>(())
/// ```
#[derive(Clone)]
pub struct Timed<B> {
    inner: B,
    /// What clones share.
    counts: Arc<Counts>,
}

struct Counts {
    ledger: Mutex<BTreeMap<(&'static str, String), Sum>>,
    paused: AtomicBool,
}

#[derive(Clone, Copy, Default)]
struct Sum {
    calls: u64,
    time: Duration,
    flops: u64,
    bytes: u64,
}

/// The calls of one operation on arguments of one size, taken together.
#[derive(Clone, Debug, PartialEq)]
pub struct OpCount {
    /// The operation, by its name in [`Backend`].
    pub op: &'static str,
    /// The sizes it worked on.
    pub detail: String,
    /// How often.
    pub calls: u64,
    /// How long in all.
    pub time: Duration,
    /// Multiplications and additions of its products; 0 where there are none.
    pub flops: u64,
    /// Bytes of arguments, weights and results, each once.
    pub bytes: u64,
}

/// A weight and how much work a row of activations is with it.
pub struct TimedWeight<W> {
    inner: W,
    /// Bytes and multiply-adds a row without the updates.
    base: (u64, u64),
    bytes: u64,
    macs: u64,
}

/// A convolution and its size.
pub struct TimedConv<C> {
    inner: C,
    bytes: u64,
    /// `[out, in, height, width]`.
    size: [usize; 4],
}

impl<B: Backend> Timed<B> {
    /// Counts what `inner` does from now on.
    pub fn new(inner: B) -> Self {
        let counts = Counts { ledger: Mutex::default(), paused: AtomicBool::new(false) };
        Timed { inner, counts: Arc::new(counts) }
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// Stops counting, or goes on with it. Counting waits for every operation, which keeps a backend that works behind the
    /// caller's back from doing so.
    pub fn pause(&self, paused: bool) {
        self.counts.paused.store(paused, Ordering::Relaxed);
    }

    /// What was counted since the last call, by operation and size.
    pub fn take(&self) -> Vec<OpCount> {
        let ledger = std::mem::take(&mut *lock(&self.counts.ledger));
        let count = |((op, detail), sum): ((&'static str, String), Sum)| {
            let Sum { calls, time, flops, bytes } = sum;
            OpCount { op, detail, calls, time, flops, bytes }
        };
        ledger.into_iter().map(count).collect()
    }

    /// Runs `call`, then asks `work` for its sizes and the work they mean.
    fn count<T>(
        &self,
        op: &'static str,
        call: impl FnOnce(&B) -> Result<T>,
        work: impl FnOnce(&T) -> (String, Work),
    ) -> Result<T> {
        if self.counts.paused.load(Ordering::Relaxed) {
            return call(&self.inner);
        }
        // A backend that works behind the caller's back is to be charged where the work belongs.
        self.inner.synchronize()?;
        let start = Instant::now();
        let result = call(&self.inner)?;
        self.inner.synchronize()?;
        let time = start.elapsed();
        let (detail, work) = work(&result);
        let mut ledger = lock(&self.counts.ledger);
        let sum = ledger.entry((op, detail)).or_default();
        sum.calls += 1;
        sum.time += time;
        sum.flops += work.flops;
        sum.bytes += work.bytes;
        Ok(result)
    }

    /// An operation whose work is to move its arguments and its result.
    fn moving(
        &self,
        op: &'static str,
        arguments: &[&B::Tensor],
        call: impl FnOnce(&B) -> Result<B::Tensor>,
    ) -> Result<B::Tensor> {
        self.count(op, call, |y| {
            (dims(y.shape()), Work::moving(bytes(arguments.iter().copied()) + bytes([y])))
        })
    }
}

/// `4608 × 3072`
fn dims(shape: &Shape) -> String {
    shape.dims().iter().map(usize::to_string).collect::<Vec<_>>().join(" × ")
}

fn linear_work<'t, T: crate::Tensor + 't, W>(
    xs: &[&T],
    w: &TimedWeight<W>,
    others: u64,
    out: impl Iterator<Item = &'t T> + Clone,
) -> (String, Work) {
    let rows = xs.first().map_or(0, |x| x.shape().rows());
    let input: usize = xs.iter().map(|x| x.shape().last()).sum();
    let output: usize = out.clone().map(|y| y.shape().last()).sum();
    let bytes = bytes(xs.iter().copied()) + w.bytes + others + bytes(out);
    (format!("{rows} × {input} → {output}"), Work { flops: 2 * rows as u64 * w.macs, bytes })
}

impl<B: Backend> Backend for Timed<B> {
    type Tensor = B::Tensor;
    type Weight = TimedWeight<B::Weight>;
    type Conv = TimedConv<B::Conv>;
    type Replays = B::Replays;

    fn name(&self) -> String {
        self.inner.name()
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn reads_host_weights(&self) -> bool {
        self.inner.reads_host_weights()
    }

    fn rows_at_once(&self) -> usize {
        self.inner.rows_at_once()
    }

    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }

    // What is replayed has no operations to count.
    fn replay<E: From<Error>>(
        &self,
        replays: &B::Replays,
        key: &[usize],
        inputs: &[&B::Tensor],
        mut work: impl FnMut(&Self, Run, &[&B::Tensor]) -> Result<B::Tensor, E>,
    ) -> Result<B::Tensor, E> {
        match self.counts.paused.load(Ordering::Relaxed) {
            true => self.inner.replay(replays, key, inputs, |inner, run, inputs| {
                work(&Timed { inner: inner.clone(), counts: Arc::clone(&self.counts) }, run, inputs)
            }),
            false => work(self, Run::Now, inputs),
        }
    }

    fn upload(&self, host: &HostTensor, dtype: DType) -> Result<B::Tensor> {
        let call = |b: &B| b.upload(host, dtype);
        self.count("upload", call, |y| {
            (dims(y.shape()), Work::moving(host.bytes().len() as u64 + bytes([y])))
        })
    }

    fn download(&self, x: &B::Tensor) -> Result<HostTensor> {
        self.count("download", |b| b.download(x), |_| (dims(x.shape()), Work::moving(2 * bytes([x]))))
    }

    fn download_bytes(&self, x: &B::Tensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
        let call = |b: &B| b.download_bytes(x, scale, shift);
        self.count("download_bytes", call, |y| (dims(x.shape()), Work::moving(bytes([x]) + y.len() as u64)))
    }

    fn download_later(&self, x: &B::Tensor) -> Result<Later<HostTensor>> {
        let work = |_: &Later<HostTensor>| (dims(x.shape()), Work::moving(2 * bytes([x])));
        self.count("download", |b| b.download_later(x), work)
    }

    fn download_bytes_later(&self, x: &B::Tensor, scale: f32, shift: f32) -> Result<Later<Vec<u8>>> {
        let work =
            |_: &Later<Vec<u8>>| (dims(x.shape()), Work::moving(bytes([x]) + x.shape().numel() as u64));
        self.count("download_bytes", |b| b.download_bytes_later(x, scale, shift), work)
    }

    fn fence(&self) -> Result<Later<()>> {
        self.inner.fence()
    }

    fn weight(&self, parts: LinearParts, residency: Residency) -> Result<Self::Weight> {
        let (base, updates) = (work::of_linear(&parts), work::of_deltas(parts.deltas()));
        let (bytes, macs) = (base.0 + updates.0, base.1 + updates.1);
        let size = format!("{} × {}", parts.rows(), parts.cols());
        let inner = self.count("weight", |b| b.weight(parts, residency), |_| (size, Work::moving(bytes)))?;
        Ok(TimedWeight { inner, base, bytes, macs })
    }

    fn with_deltas(&self, w: &Self::Weight, deltas: Vec<Delta>) -> Result<Self::Weight> {
        let (bytes, macs) = work::of_deltas(&deltas);
        let work = |_: &B::Weight| (String::new(), Work::moving(bytes));
        let inner = self.count("with_deltas", |b| b.with_deltas(&w.inner, deltas), work)?;
        Ok(TimedWeight { inner, base: w.base, bytes: w.base.0 + bytes, macs: w.base.1 + macs })
    }

    fn conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<Self::Conv> {
        let bytes = (kernel.bytes().len() + bias.map_or(0, |b| b.bytes().len())) as u64;
        let call = |b: &B| b.conv(kernel, bias);
        let inner = self.count("conv", call, |_| (dims(kernel.shape()), Work::moving(bytes)))?;
        // The backend has checked that there are four.
        let size = kernel.shape().dims().try_into().unwrap_or_default();
        Ok(TimedConv { inner, bytes, size })
    }

    fn reshape(&self, x: &B::Tensor, shape: Shape) -> Result<B::Tensor> {
        self.count("reshape", |b| b.reshape(x, shape), |y| (dims(y.shape()), Work::default()))
    }

    fn cast(&self, x: &B::Tensor, dtype: DType) -> Result<B::Tensor> {
        // What has the dtype already is not moved.
        let moved = |y: &B::Tensor| if x.dtype() == dtype { 0 } else { bytes([x, y]) };
        self.count("cast", |b| b.cast(x, dtype), |y| (dims(y.shape()), Work::moving(moved(y))))
    }

    fn slice_rows(&self, x: &B::Tensor, range: Range<usize>) -> Result<B::Tensor> {
        self.count("slice_rows", |b| b.slice_rows(x, range), |y| (dims(y.shape()), Work::default()))
    }

    fn concat_rows(&self, parts: &[&B::Tensor]) -> Result<B::Tensor> {
        self.moving("concat_rows", parts, |b| b.concat_rows(parts))
    }

    fn concat_columns(&self, parts: &[&B::Tensor]) -> Result<B::Tensor> {
        self.moving("concat_columns", parts, |b| b.concat_columns(parts))
    }

    fn linear(&self, x: &B::Tensor, w: &Self::Weight) -> Result<B::Tensor> {
        self.count("linear", |b| b.linear(x, &w.inner), |y| linear_work(&[x], w, 0, [y].into_iter()))
    }

    fn linear_split<const N: usize>(
        &self,
        x: &B::Tensor,
        w: &Self::Weight,
        widths: [usize; N],
    ) -> Result<[B::Tensor; N]> {
        let call = |b: &B| b.linear_split(x, &w.inner, widths);
        self.count("linear_split", call, |ys| linear_work(&[x], w, 0, ys.iter()))
    }

    fn linear_gated_add(
        &self,
        xs: &[&B::Tensor],
        w: &Self::Weight,
        gate: Option<(&B::Tensor, &Groups)>,
        residual: &B::Tensor,
    ) -> Result<B::Tensor> {
        let others = bytes(gate.map(|(gate, _)| gate)) + bytes([residual]);
        let call = |b: &B| b.linear_gated_add(xs, &w.inner, gate, residual);
        self.count("linear_gated_add", call, |y| linear_work(xs, w, others, [y].into_iter()))
    }

    fn swiglu_gated_add(
        &self,
        beside: Option<&B::Tensor>,
        gate_up: &B::Tensor,
        w: &Self::Weight,
        gate: Option<(&B::Tensor, &Groups)>,
        residual: &B::Tensor,
    ) -> Result<B::Tensor> {
        let xs: Vec<_> = beside.into_iter().chain([gate_up]).collect();
        let others = bytes(gate.map(|(gate, _)| gate)) + bytes([residual]);
        let call = |b: &B| b.swiglu_gated_add(beside, gate_up, &w.inner, gate, residual);
        self.count("swiglu_gated_add", call, |y| linear_work(&xs, w, others, [y].into_iter()))
    }

    fn ada_layer_norm(
        &self,
        x: &B::Tensor,
        scale: &B::Tensor,
        shift: &B::Tensor,
        groups: &Groups,
        eps: f32,
    ) -> Result<B::Tensor> {
        self.moving("ada_layer_norm", &[x, scale, shift], |b| b.ada_layer_norm(x, scale, shift, groups, eps))
    }

    fn ada_linear_split<const N: usize>(
        &self,
        x: &B::Tensor,
        modulation: [&B::Tensor; 2],
        groups: &Groups,
        eps: f32,
        w: &Self::Weight,
        widths: [usize; N],
    ) -> Result<[B::Tensor; N]> {
        let call = |b: &B| b.ada_linear_split(x, modulation, groups, eps, &w.inner, widths);
        self.count("ada_linear_split", call, |ys| linear_work(&[x], w, bytes(modulation), ys.iter()))
    }

    fn rms_norm(&self, x: &B::Tensor, weight: &B::Tensor, eps: f32) -> Result<B::Tensor> {
        self.moving("rms_norm", &[x, weight], |b| b.rms_norm(x, weight, eps))
    }

    fn norm_rope(
        &self,
        x: &B::Tensor,
        weight: &B::Tensor,
        rope: &RopeTable<Self>,
        eps: f32,
    ) -> Result<B::Tensor> {
        let table = RopeTable { cos: rope.cos.clone(), sin: rope.sin.clone(), pairs: rope.pairs };
        self.moving("norm_rope", &[x, &rope.cos, &rope.sin], |b| b.norm_rope(x, weight, &table, eps))
    }

    fn qk_norm_rope(
        &self,
        qk: [&B::Tensor; 2],
        weights: [&B::Tensor; 2],
        rope: &RopeTable<Self>,
        eps: f32,
    ) -> Result<[B::Tensor; 2]> {
        let table = RopeTable { cos: rope.cos.clone(), sin: rope.sin.clone(), pairs: rope.pairs };
        let call = |b: &B| b.qk_norm_rope(qk, weights, &table, eps);
        self.count("qk_norm_rope", call, |[q, k]| {
            let detail = format!("{} × {} + {}", q.shape().rows(), q.shape().last(), k.shape().last());
            (detail, Work::moving(bytes(qk) + bytes([&rope.cos, &rope.sin, q, k])))
        })
    }

    fn attention(
        &self,
        q: &[&B::Tensor],
        k: &[&B::Tensor],
        v: &[&B::Tensor],
        spec: &AttentionSpec,
    ) -> Result<B::Tensor> {
        self.count(
            "attention",
            |b| b.attention(q, k, v, spec),
            |y| {
                let keys: usize = k.iter().map(|k| k.shape().rows()).sum();
                let (queries, width) = (y.shape().rows(), y.shape().last());
                let all = q.iter().chain(k).chain(v).copied();
                let flops = 4 * work::pairs(queries, keys, &spec.mask) * width as u64;
                let masked = match spec.mask {
                    Mask::None => "",
                    Mask::Causal { .. } => ", causal",
                    Mask::Isolated { .. } => ", isolated",
                };
                let detail = format!(
                    "{queries} × {keys}, {} heads × {}{masked}",
                    spec.heads,
                    width / spec.heads.max(1)
                );
                (detail, Work { flops, bytes: bytes(all) + bytes([y]) })
            },
        )
    }

    fn swiglu(&self, x: &B::Tensor) -> Result<B::Tensor> {
        self.moving("swiglu", &[x], |b| b.swiglu(x))
    }

    fn activation(&self, x: &B::Tensor, f: Activation) -> Result<B::Tensor> {
        self.moving("activation", &[x], |b| b.activation(x, f))
    }

    fn add(&self, x: &B::Tensor, y: &B::Tensor) -> Result<B::Tensor> {
        self.moving("add", &[x, y], |b| b.add(x, y))
    }

    fn add_scaled(&self, x: &B::Tensor, y: &B::Tensor, s: f32) -> Result<B::Tensor> {
        self.moving("add_scaled", &[x, y], |b| b.add_scaled(x, y, s))
    }

    fn lerp(&self, x: &B::Tensor, y: &B::Tensor, t: f32) -> Result<B::Tensor> {
        self.moving("lerp", &[x, y], |b| b.lerp(x, y, t))
    }

    fn guide(&self, c: &B::Tensor, u: &B::Tensor, g: f32) -> Result<B::Tensor> {
        self.moving("guide", &[c, u], |b| b.guide(c, u, g))
    }

    fn blend_rows(&self, x: &B::Tensor, y: &B::Tensor, mask: &B::Tensor) -> Result<B::Tensor> {
        self.moving("blend_rows", &[x, y, mask], |b| b.blend_rows(x, y, mask))
    }

    fn affine(&self, x: &B::Tensor, scale: &B::Tensor, shift: &B::Tensor) -> Result<B::Tensor> {
        self.moving("affine", &[x, scale, shift], |b| b.affine(x, scale, shift))
    }

    fn space_to_depth(&self, x: &B::Tensor) -> Result<B::Tensor> {
        self.moving("space_to_depth", &[x], |b| b.space_to_depth(x))
    }

    fn depth_to_space(&self, x: &B::Tensor) -> Result<B::Tensor> {
        self.moving("depth_to_space", &[x], |b| b.depth_to_space(x))
    }

    fn group_norm(
        &self,
        x: &B::Tensor,
        groups: usize,
        weight: &B::Tensor,
        bias: &B::Tensor,
        eps: f32,
        f: Option<Activation>,
    ) -> Result<B::Tensor> {
        self.moving("group_norm", &[x, weight, bias], |b| b.group_norm(x, groups, weight, bias, eps, f))
    }

    fn conv2d(
        &self,
        x: &B::Tensor,
        conv: &Self::Conv,
        geometry: ConvGeometry,
        residual: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let call = |b: &B| b.conv2d(x, &conv.inner, geometry, residual);
        self.count("conv2d", call, |y| {
            let [out, input, height, width] = conv.size;
            let pixels = y.shape().numel() / out.max(1);
            let (rows, columns) = (y.shape().dims()[0], y.shape().dims()[1]);
            let work = Work {
                flops: 2 * (pixels * out * input * height * width) as u64,
                bytes: bytes([x, y]) + bytes(residual) + conv.bytes,
            };
            (format!("{rows} × {columns}, {input} → {out}, {height} × {width}"), work)
        })
    }
}

//! The operations of a timed backend, and what each costs.

use std::sync::Arc;

use super::cost::{
    Argument as _, Cost, Output as _, attention_cost, bytes, conv_cost, dims, linear_cost, low_rank_cost,
    product_cost, step_cost,
};
use super::{TimedBackend, TimedConv, TimedWeight};
use crate::signatures::*;
use crate::{Backend, Error, RunMode, Tensor, TrainingBackend};

/// Forwards an operation to the inner backend and measures it. Only those with a special cost have their own arm.
macro_rules! measured {
    // Operations without a cost.
    ($self:ident, synchronize()) => { $self.inner.synchronize() };
    ($self:ident, fence()) => { $self.inner.fence() };
    ($self:ident, upload_quantized $arguments:tt) => { $self.inner.upload_quantized $arguments };
    ($self:ident, download_quantized $arguments:tt) => { $self.inner.download_quantized $arguments };

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
            linear_cost(&[$x], $w, 0, y)
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
        $self.measure("linear_gated_add", call, |y| linear_cost($xs, $w, others, y))
    }};
    ($self:ident, linear_swiglu($x:ident, $w:ident)) => {
        $self.measure("linear_swiglu", |b| b.linear_swiglu($x, &$w.inner), |y| {
            linear_cost(&[$x], $w, 0, y)
        })
    };
    ($self:ident, ada_linear_swiglu(
        $x:ident, $modulation:ident, $groups:ident, $eps:ident, $w:ident, $widths:ident
    )) => {{
        let call = |b: &B| b.ada_linear_swiglu($x, $modulation, $groups, $eps, &$w.inner, $widths);
        $self.measure("ada_linear_swiglu", call, |ys| linear_cost(&[$x], $w, bytes($modulation), ys))
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
    ($self:ident, norm_rope_attention($qk:ident, $v:ident, $eps:ident, $spec:ident)) => {{
        let [q, k] = [0, 1].map(|i| $qk.iter().map(|block| block.qk[i]).collect::<Vec<_>>());
        $self.measure("norm_rope_attention", |b| b.norm_rope_attention($qk, $v, $eps, $spec), |y| {
            attention_cost([&q, &k, $v], $spec, y)
        })
    }};
    ($self:ident, conv2d($x:ident, $conv:ident, $geometry:ident, $residual:ident)) => {
        $self.measure("conv2d", |b| b.conv2d($x, &$conv.inner, $geometry, $residual), |y| {
            conv_cost($x, $conv, $residual, y)
        })
    };

    // Products of training.
    ($self:ident, linear_backward($dys:ident, $w:ident, $add:ident)) => {
        $self.measure("linear_backward", |b| b.linear_backward($dys, &$w.inner, $add), |y| {
            linear_cost($dys, $w, bytes($add), y)
        })
    };
    ($self:ident, matmul_nt($x:ident, $w:ident, $scale:ident, $add:ident)) => {
        $self.measure("matmul_nt", |b| b.matmul_nt($x, $w, $scale, $add), |y| {
            product_cost([$x.shape().rows(), $x.shape().last(), $w.shape().rows()], [$x, $w], $add, y)
        })
    };
    ($self:ident, matmul_nn($dy:ident, $w:ident, $scale:ident, $add:ident)) => {
        $self.measure("matmul_nn", |b| b.matmul_nn($dy, $w, $scale, $add), |y| {
            product_cost([$dy.shape().rows(), $dy.shape().last(), $w.shape().last()], [$dy, $w], $add, y)
        })
    };
    ($self:ident, matmul_tn($dy:ident, $x:ident, $scale:ident, $add:ident)) => {
        $self.measure("matmul_tn", |b| b.matmul_tn($dy, $x, $scale, $add), |y| {
            product_cost([$dy.shape().last(), $dy.shape().rows(), $x.shape().last()], [$dy, $x], $add, y)
        })
    };
    ($self:ident, linear_low_rank($x:ident, $w:ident, $updates:ident, $widths:ident)) => {
        $self.measure("linear_low_rank", |b| b.linear_low_rank($x, &$w.inner, $updates, $widths), |y| {
            linear_cost(&[$x], $w, 0, &y.ys)
        })
    };
    ($self:ident, low_rank_backward($dys:ident, $x:ident, $updates:ident, $inner:ident, $add:ident)) => {
        $self.measure("low_rank_backward", |b| b.low_rank_backward($dys, $x, $updates, $inner, $add), |y| {
            low_rank_cost($dys, $x, $inner, y)
        })
    };
    ($self:ident, row_norms($w:ident, $updates:ident)) => {
        $self.measure("row_norms", |b| b.row_norms(&$w.inner, $updates), |y| {
            (dims(y.shape()), Cost::memory($w.base.bytes))
        })
    };
    ($self:ident, attention_lse($q:ident, $k:ident, $v:ident, $spec:ident)) => {
        $self.measure("attention_lse", |b| b.attention_lse($q, $k, $v, $spec), |[y, _]| {
            attention_cost([$q, $k, $v], $spec, y)
        })
    };
    ($self:ident, attention_backward(
        $dout:ident, $q:ident, $k:ident, $v:ident, $out:ident, $lse:ident, $spec:ident
    )) => {{
        let call = |b: &B| b.attention_backward($dout, $q, $k, $v, $out, $lse, $spec);
        $self.measure("attention_backward", call, |gradients| {
            let (detail, cost) = attention_cost([$q, $k, $v], $spec, $out);
            let gradients = bytes(gradients) + $dout.bytes();
            // Five products of the forward pass's two sizes.
            (detail, Cost { flops: cost.flops / 2 * 5, bytes: cost.bytes + gradients })
        })
    }};

    // Optimizer steps: tensors that are changed are read and written, gradients and starting values read.
    ($self:ident, adamw($tensors:ident, $step:ident)) => {{
        let cost = step_cost($tensors.iter().map(|t| &*t.param), 7 * 4);
        $self.measure("adamw", |b| b.adamw($tensors, $step), |()| cost)
    }};
    ($self:ident, adamw_8bit($tensors:ident, $step:ident)) => {{
        let cost = step_cost($tensors.iter().map(|t| &*t.param), 3 * 4 + 4);
        $self.measure("adamw_8bit", |b| b.adamw_8bit($tensors, $step), |()| cost)
    }};
    ($self:ident, prodigy_moments($tensors:ident, $step:ident)) => {{
        let cost = step_cost($tensors.iter().map(|t| &*t.param), 9 * 4);
        $self.measure("prodigy_moments", |b| b.prodigy_moments($tensors, $step), |_| cost)
    }};
    ($self:ident, prodigy_update($tensors:ident, $lr:ident, $decay:ident, $eps:ident)) => {{
        let cost = step_cost($tensors.iter().map(|t| &*t.param), 4 * 4);
        $self.measure("prodigy_update", |b| b.prodigy_update($tensors, $lr, $decay, $eps), |()| cost)
    }};

    // All other operations read their arguments and write their results.
    ($self:ident, $op:ident($($argument:ident),*)) => {{
        let arguments = 0 $(+ $argument.bytes())*;
        $self.measure(stringify!($op), |b| b.$op($($argument),*), |y| y.memory_cost(arguments))
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

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn reads_host_weights(&self) -> bool {
        self.inner.reads_host_weights()
    }

    fn max_batch_rows(&self) -> usize {
        self.inner.max_batch_rows()
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

impl<B: TrainingBackend> TrainingBackend for TimedBackend<B> {
    type Quantized = B::Quantized;

    training_methods!(required, measured);
    training_methods!(provided, measured);
}

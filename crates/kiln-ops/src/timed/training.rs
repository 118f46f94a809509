//! [`TrainingBackend`] of a timed backend.

use kiln_tensor::{DType, Shape};

use super::cost::{Cost, bytes};
use super::{TimedBackend, TimedWeight, attention_cost, dims, linear_cost};
use crate::training::{
    AdamWStep, AdamWTensor, AdaptedOutput, LowRank, LowRankGradient, ProdigyStep, ProdigyTensor, Quantized8,
    QuantizedAdamWTensor,
};
use crate::{AttentionSpec, Result, RopeTable, RowGroups, Tensor, TrainingBackend};

type W<B> = TimedWeight<<B as crate::Backend>::Weight>;

/// Sizes and cost of a product of `[rows, k]` and `[k, n]`, or of these transposed.
fn product_cost<T: Tensor>(
    [rows, k, n]: [usize; 3],
    inputs: [&T; 2],
    add: Option<&T>,
    out: &T,
) -> (String, Cost) {
    let flops = 2 * (rows * k * n) as u64;
    (format!("{rows} × {k} × {n}"), Cost { flops, bytes: bytes(inputs) + bytes(add) + bytes([out]) })
}

/// An operation that reads its arguments and writes its result.
fn memory_cost<'t, T: Tensor + 't>(inputs: impl IntoIterator<Item = &'t T>, out: &T) -> (String, Cost) {
    (dims(out.shape()), Cost::memory(bytes(inputs) + bytes([out])))
}

impl<B: TrainingBackend> TrainingBackend for TimedBackend<B> {
    type Quantized = B::Quantized;

    fn upload_quantized(&self, host: &Quantized8) -> Result<B::Quantized> {
        self.inner.upload_quantized(host)
    }

    fn download_quantized(&self, x: &B::Quantized) -> Result<Quantized8> {
        self.inner.download_quantized(x)
    }

    fn zeros(&self, shape: Shape, dtype: DType) -> Result<B::Tensor> {
        self.measure("zeros", |b| b.zeros(shape, dtype), |y| (dims(y.shape()), Cost::memory(bytes([y]))))
    }

    fn split_columns(&self, x: &B::Tensor, widths: &[usize]) -> Result<Vec<B::Tensor>> {
        let describe = |_: &Vec<B::Tensor>| (dims(x.shape()), Cost::memory(2 * bytes([x])));
        self.measure("split_columns", |b| b.split_columns(x, widths), describe)
    }

    fn linear_backward(&self, dys: &[&B::Tensor], w: &W<B>, add: Option<&B::Tensor>) -> Result<B::Tensor> {
        let call = |b: &B| b.linear_backward(dys, &w.inner, add);
        self.measure("linear_backward", call, |y| linear_cost(dys, w, bytes(add), std::slice::from_ref(y)))
    }

    fn matmul_nt(
        &self,
        x: &B::Tensor,
        w: &B::Tensor,
        scale: f32,
        add: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let size = [x.shape().rows(), x.shape().last(), w.shape().rows()];
        let describe = |y: &B::Tensor| product_cost(size, [x, w], add, y);
        self.measure("matmul_nt", |b| b.matmul_nt(x, w, scale, add), describe)
    }

    fn matmul_nn(
        &self,
        dy: &B::Tensor,
        w: &B::Tensor,
        scale: f32,
        add: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let size = [dy.shape().rows(), dy.shape().last(), w.shape().last()];
        let describe = |y: &B::Tensor| product_cost(size, [dy, w], add, y);
        self.measure("matmul_nn", |b| b.matmul_nn(dy, w, scale, add), describe)
    }

    fn matmul_tn(
        &self,
        dy: &B::Tensor,
        x: &B::Tensor,
        scale: f32,
        add: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let size = [dy.shape().last(), dy.shape().rows(), x.shape().last()];
        let describe = |y: &B::Tensor| product_cost(size, [dy, x], add, y);
        self.measure("matmul_tn", |b| b.matmul_tn(dy, x, scale, add), describe)
    }

    fn linear_low_rank(
        &self,
        x: &B::Tensor,
        w: &W<B>,
        updates: &[LowRank<'_, B::Tensor>],
        widths: &[usize],
    ) -> Result<AdaptedOutput<B::Tensor>> {
        let call = |b: &B| b.linear_low_rank(x, &w.inner, updates, widths);
        self.measure("linear_low_rank", call, |y| linear_cost(&[x], w, 0, &y.ys))
    }

    fn low_rank_backward(
        &self,
        dys: &[&B::Tensor],
        x: &B::Tensor,
        updates: &[LowRank<'_, B::Tensor>],
        inner: &[B::Tensor],
        add: &[Option<[&B::Tensor; 2]>],
    ) -> Result<Vec<LowRankGradient<B::Tensor>>> {
        let describe = |gradients: &Vec<LowRankGradient<B::Tensor>>| {
            let out: usize = dys.iter().map(|dy| dy.shape().last()).sum();
            let rank: usize = inner.iter().map(|inner| inner.shape().last()).sum();
            let [rows, cols] = [x.shape().rows(), x.shape().last()];
            let moved = bytes(dys.iter().copied().chain([x]))
                + bytes(gradients.iter().flat_map(|g| [&g.down, &g.up, &g.inner]));
            let cost = Cost { flops: (2 * rows * rank * (2 * out + cols)) as u64, bytes: moved };
            (format!("{rows} × {out} → {cols}, rank {rank}"), cost)
        };
        let call = |b: &B| b.low_rank_backward(dys, x, updates, inner, add);
        self.measure("low_rank_backward", call, describe)
    }

    fn row_norms(&self, w: &W<B>, updates: &[LowRank<'_, B::Tensor>]) -> Result<B::Tensor> {
        let describe = |y: &B::Tensor| (dims(y.shape()), Cost::memory(w.base.bytes));
        self.measure("row_norms", |b| b.row_norms(&w.inner, updates), describe)
    }

    fn mix_rows(&self, x: &B::Tensor, a: &B::Tensor, transposed: bool) -> Result<B::Tensor> {
        self.measure("mix_rows", |b| b.mix_rows(x, a, transposed), |y| memory_cost([x, a], y))
    }

    fn mix_rows_gradient(
        &self,
        dy: &B::Tensor,
        x: &B::Tensor,
        size: [usize; 2],
        scale: f32,
        add: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let call = |b: &B| b.mix_rows_gradient(dy, x, size, scale, add);
        self.measure("mix_rows_gradient", call, |y| memory_cost([dy, x], y))
    }

    fn column_dot(&self, x: &B::Tensor, y: &B::Tensor, add: Option<&B::Tensor>) -> Result<B::Tensor> {
        self.measure("column_dot", |b| b.column_dot(x, y, add), |out| memory_cost([x, y], out))
    }

    fn dropout(&self, x: &B::Tensor, rate: f32, seed: u64) -> Result<B::Tensor> {
        self.measure("dropout", |b| b.dropout(x, rate, seed), |y| memory_cost([x], y))
    }

    fn ada_layer_norm_backward(
        &self,
        dy: &B::Tensor,
        x: &B::Tensor,
        scale: &B::Tensor,
        groups: &RowGroups,
        eps: f32,
        add: Option<&B::Tensor>,
    ) -> Result<B::Tensor> {
        let call = |b: &B| b.ada_layer_norm_backward(dy, x, scale, groups, eps, add);
        self.measure("ada_layer_norm_backward", call, |dx| memory_cost([dy, x].into_iter().chain(add), dx))
    }

    fn norm_rope_backward(
        &self,
        dy: &B::Tensor,
        x: &B::Tensor,
        weight: Option<&B::Tensor>,
        rope: &RopeTable<B::Tensor>,
        eps: f32,
    ) -> Result<B::Tensor> {
        let call = |b: &B| b.norm_rope_backward(dy, x, weight, rope, eps);
        self.measure("norm_rope_backward", call, |dx| memory_cost([dy, x], dx))
    }

    fn swiglu_backward(&self, dy: &B::Tensor, x: &B::Tensor) -> Result<B::Tensor> {
        self.measure("swiglu_backward", |b| b.swiglu_backward(dy, x), |dx| memory_cost([dy, x], dx))
    }

    fn concat_swiglu(&self, left: &B::Tensor, x: &B::Tensor) -> Result<B::Tensor> {
        self.measure("concat_swiglu", |b| b.concat_swiglu(left, x), |y| memory_cost([left, x], y))
    }

    fn concat_swiglu_backward(&self, dy: &B::Tensor, x: &B::Tensor) -> Result<[B::Tensor; 2]> {
        let describe = |[left, dx]: &[B::Tensor; 2]| memory_cost([dy, x, left], dx);
        self.measure("concat_swiglu_backward", |b| b.concat_swiglu_backward(dy, x), describe)
    }

    fn gate_rows(&self, x: &B::Tensor, gate: &B::Tensor, groups: &RowGroups) -> Result<B::Tensor> {
        self.measure("gate_rows", |b| b.gate_rows(x, gate, groups), |y| memory_cost([x], y))
    }

    fn gated_add(
        &self,
        x: &B::Tensor,
        gate: &B::Tensor,
        groups: &RowGroups,
        residual: &B::Tensor,
    ) -> Result<B::Tensor> {
        let call = |b: &B| b.gated_add(x, gate, groups, residual);
        self.measure("gated_add", call, |y| memory_cost([x, residual], y))
    }

    fn attention_lse(
        &self,
        q: &[&B::Tensor],
        k: &[&B::Tensor],
        v: &[&B::Tensor],
        spec: &AttentionSpec,
    ) -> Result<[B::Tensor; 2]> {
        let call = |b: &B| b.attention_lse(q, k, v, spec);
        self.measure("attention_lse", call, |[out, _]| attention_cost([q, k, v], spec, out))
    }

    fn attention_backward(
        &self,
        dout: &[&B::Tensor],
        q: &[&B::Tensor],
        k: &[&B::Tensor],
        v: &[&B::Tensor],
        out: &B::Tensor,
        lse: &B::Tensor,
        spec: &AttentionSpec,
    ) -> Result<[B::Tensor; 3]> {
        let call = |b: &B| b.attention_backward(dout, q, k, v, out, lse, spec);
        self.measure("attention_backward", call, |gradients| {
            let (detail, cost) = attention_cost([q, k, v], spec, out);
            let gradients = bytes(gradients) + bytes(dout.iter().copied());
            // Five products of the forward pass's two sizes.
            (detail, Cost { flops: cost.flops / 2 * 5, bytes: cost.bytes + gradients })
        })
    }

    fn squared_error(&self, x: &B::Tensor, y: &B::Tensor, scale: f32) -> Result<[B::Tensor; 2]> {
        self.measure("squared_error", |b| b.squared_error(x, y, scale), |[_, dx]| memory_cost([x, y], dx))
    }

    fn sum_squares(&self, xs: &[&B::Tensor]) -> Result<B::Tensor> {
        self.measure("sum_squares", |b| b.sum_squares(xs), |y| memory_cost(xs.iter().copied(), y))
    }

    fn adamw(&self, tensors: &mut [AdamWTensor<'_, B::Tensor>], step: &AdamWStep) -> Result<()> {
        let count: usize = tensors.iter().map(|t| t.param.shape().numel()).sum();
        // Parameters and two moments are read and written, gradients read.
        let describe = |(): &()| (count.to_string(), Cost::memory((7 * count * DType::F32.size()) as u64));
        self.measure("adamw", |b| b.adamw(tensors, step), describe)
    }

    fn adamw_8bit(
        &self,
        tensors: &mut [QuantizedAdamWTensor<'_, B::Tensor, B::Quantized>],
        step: &AdamWStep,
    ) -> Result<()> {
        let count: usize = tensors.iter().map(|t| t.param.shape().numel()).sum();
        let describe = |(): &()| (count.to_string(), Cost::memory((16 * count) as u64));
        self.measure("adamw_8bit", |b| b.adamw_8bit(tensors, step), describe)
    }

    fn prodigy_moments(
        &self,
        tensors: &mut [ProdigyTensor<'_, B::Tensor>],
        step: &ProdigyStep,
    ) -> Result<B::Tensor> {
        let count: usize = tensors.iter().map(|t| t.param.shape().numel()).sum();
        let describe = |_: &B::Tensor| (count.to_string(), Cost::memory((9 * count * 4) as u64));
        self.measure("prodigy_moments", |b| b.prodigy_moments(tensors, step), describe)
    }

    fn prodigy_update(
        &self,
        tensors: &mut [ProdigyTensor<'_, B::Tensor>],
        lr: f32,
        decay: f32,
        eps: f32,
    ) -> Result<()> {
        let count: usize = tensors.iter().map(|t| t.param.shape().numel()).sum();
        let describe = |(): &()| (count.to_string(), Cost::memory((4 * count * 4) as u64));
        self.measure("prodigy_update", |b| b.prodigy_update(tensors, lr, decay, eps), describe)
    }
}

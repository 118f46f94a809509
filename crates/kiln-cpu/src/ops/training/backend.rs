//! The [`TrainingBackend`] implementation: each operation is a call into this folder's modules.

use kiln_ops::training::{
    AdamWStep, AdamWTensor, LowRank, ProdigyStep, ProdigyTensor, Quantized8, QuantizedAdamWTensor, shapes,
};
use kiln_ops::{AttentionSpec, Result, RopeTable, RowGroups, TrainingBackend};

use super::{attention, backward, matmul, optimizer};
use crate::{CpuBackend, CpuTensor, CpuWeight};

type T = CpuTensor;

impl TrainingBackend for CpuBackend {
    type Quantized = Quantized8;

    fn upload_quantized(&self, host: &Quantized8) -> Result<Quantized8> {
        shapes::upload_quantized(host)?;
        Ok(host.clone())
    }

    fn download_quantized(&self, x: &Quantized8) -> Result<Quantized8> {
        Ok(x.clone())
    }

    fn split_columns(&self, x: &T, widths: &[usize]) -> Result<Vec<T>> {
        matmul::split_columns(self.context(), x, widths)
    }

    fn linear_backward(&self, dys: &[&T], w: &CpuWeight, add: Option<&T>) -> Result<T> {
        matmul::linear_backward(self.context(), dys, w, add)
    }

    fn matmul_nt(&self, x: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
        matmul::matmul_nt(self.context(), x, w, scale, add)
    }

    fn matmul_nn(&self, dy: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
        matmul::matmul_nn(self.context(), dy, w, scale, add)
    }

    fn matmul_tn(&self, dy: &T, x: &T, scale: f32, add: Option<&T>) -> Result<T> {
        matmul::matmul_tn(self.context(), dy, x, scale, add)
    }

    fn row_norms(&self, w: &CpuWeight, updates: &[LowRank<'_, T>]) -> Result<T> {
        matmul::row_norms(self.context(), w, updates)
    }

    fn mix_rows(&self, x: &T, a: &T, transposed: bool) -> Result<T> {
        backward::mix_rows(self.context(), x, a, transposed)
    }

    fn mix_rows_gradient(&self, dy: &T, x: &T, size: [usize; 2], scale: f32, add: Option<&T>) -> Result<T> {
        backward::mix_rows_gradient(self.context(), dy, x, size, scale, add)
    }

    fn column_dot(&self, x: &T, y: &T, add: Option<&T>) -> Result<T> {
        backward::column_dot(self.context(), x, y, add)
    }

    fn dropout(&self, x: &T, rate: f32, seed: u64) -> Result<T> {
        backward::dropout(self.context(), x, rate, seed)
    }

    fn ada_layer_norm_backward(
        &self,
        dy: &T,
        x: &T,
        scale: &T,
        groups: &RowGroups,
        eps: f32,
        add: Option<&T>,
    ) -> Result<T> {
        backward::ada_layer_norm(self.context(), dy, x, scale, groups, eps, add)
    }

    fn norm_rope_backward(
        &self,
        dy: &T,
        x: &T,
        weight: Option<&T>,
        rope: &RopeTable<T>,
        eps: f32,
    ) -> Result<T> {
        backward::norm_rope(self.context(), dy, x, weight, rope, eps)
    }

    fn swiglu_backward(&self, dy: &T, x: &T) -> Result<T> {
        backward::swiglu(self.context(), dy, x)
    }

    fn gate_rows(&self, x: &T, gate: &T, groups: &RowGroups) -> Result<T> {
        backward::gate_rows(self.context(), x, gate, groups)
    }

    fn attention_lse(&self, q: &[&T], k: &[&T], v: &[&T], spec: &AttentionSpec) -> Result<[T; 2]> {
        attention::forward(self.context(), q, k, v, spec)
    }

    fn attention_backward(
        &self,
        dout: &[&T],
        q: &[&T],
        k: &[&T],
        v: &[&T],
        out: &T,
        lse: &T,
        spec: &AttentionSpec,
    ) -> Result<[T; 3]> {
        attention::backward(self.context(), dout, [q, k, v], out, lse, spec)
    }

    fn squared_error(&self, x: &T, y: &T, scale: f32) -> Result<[T; 2]> {
        backward::squared_error(self.context(), x, y, scale)
    }

    fn sum_squares(&self, xs: &[&T]) -> Result<T> {
        backward::sum_squares(self.context(), xs)
    }

    fn adamw(&self, tensors: &mut [AdamWTensor<'_, T>], step: &AdamWStep) -> Result<()> {
        optimizer::adamw(self.context(), tensors, step)
    }

    fn adamw_8bit(
        &self,
        tensors: &mut [QuantizedAdamWTensor<'_, T, Quantized8>],
        step: &AdamWStep,
    ) -> Result<()> {
        optimizer::adamw_8bit(self.context(), tensors, step)
    }

    fn prodigy_moments(&self, tensors: &mut [ProdigyTensor<'_, T>], step: &ProdigyStep) -> Result<T> {
        optimizer::prodigy_moments(self.context(), tensors, step)
    }

    fn prodigy_update(
        &self,
        tensors: &mut [ProdigyTensor<'_, T>],
        lr: f32,
        decay: f32,
        eps: f32,
    ) -> Result<()> {
        optimizer::prodigy_update(self.context(), tensors, lr, decay, eps)
    }
}

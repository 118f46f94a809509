//! [`TrainingBackend`] implemented by the launchers in `ops::training`.

use kiln_ops::training::{
    AdamWStep, AdamWTensor, AdaptedOutput, LowRank, LowRankGradient, ProdigyStep, ProdigyTensor, Quantized8,
    QuantizedAdamWTensor, shapes,
};
use kiln_ops::{AttentionSpec, Result, RopeTable, RowGroups, TrainingBackend};
use kiln_tensor::{DType, Shape};

use crate::backend::CudaBackend;
use crate::ops::elementwise;
use crate::ops::training::optimizer::CudaQuantized;
use crate::ops::training::{adapter, attention, backward, matmul, optimizer};
use crate::tensor::CudaTensor;
use crate::weight::CudaWeight;

type T = CudaTensor;

impl TrainingBackend for CudaBackend {
    type Quantized = CudaQuantized;

    fn upload_quantized(&self, host: &Quantized8) -> Result<CudaQuantized> {
        CudaQuantized::from_host(&self.cx, host)
    }

    fn download_quantized(&self, x: &CudaQuantized) -> Result<Quantized8> {
        x.to_host(&self.cx)
    }

    fn zeros(&self, shape: Shape, dtype: DType) -> Result<T> {
        adapter::zeros(&self.cx, shape, dtype)
    }

    fn split_columns(&self, x: &T, widths: &[usize]) -> Result<Vec<T>> {
        adapter::split_columns(&self.cx, x, widths)
    }

    fn linear_backward(&self, dys: &[&T], w: &CudaWeight, add: Option<&T>) -> Result<T> {
        matmul::linear_backward(&self.cx, dys, w, add)
    }

    fn matmul_nt(&self, x: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
        matmul::matmul_nt(&self.cx, x, w, scale, add)
    }

    fn matmul_nn(&self, dy: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
        matmul::matmul_nn(&self.cx, dy, w, scale, add)
    }

    fn matmul_tn(&self, dy: &T, x: &T, scale: f32, add: Option<&T>) -> Result<T> {
        matmul::matmul_tn(&self.cx, dy, x, scale, add)
    }

    fn linear_low_rank(
        &self,
        x: &T,
        w: &CudaWeight,
        updates: &[LowRank<'_, T>],
        widths: &[usize],
    ) -> Result<AdaptedOutput<T>> {
        matmul::linear_low_rank(&self.cx, x, w, updates, widths)
    }

    fn low_rank_backward(
        &self,
        dys: &[&T],
        x: &T,
        updates: &[LowRank<'_, T>],
        inner: &[T],
        add: &[Option<[&T; 2]>],
    ) -> Result<Vec<LowRankGradient<T>>> {
        match matmul::low_rank_backward(&self.cx, dys, x, updates, inner, add)? {
            Some(gradients) => Ok(gradients),
            None => kiln_ops::training::low_rank_backward(self, dys, x, updates, inner, add),
        }
    }

    fn row_norms(&self, w: &CudaWeight, updates: &[LowRank<'_, T>]) -> Result<T> {
        matmul::row_norms(&self.cx, w, updates)
    }

    fn mix_rows(&self, x: &T, a: &T, transposed: bool) -> Result<T> {
        adapter::mix_rows(&self.cx, x, a, transposed)
    }

    fn mix_rows_gradient(&self, dy: &T, x: &T, size: [usize; 2], scale: f32, add: Option<&T>) -> Result<T> {
        adapter::mix_rows_gradient(&self.cx, dy, x, size, scale, add)
    }

    fn column_dot(&self, x: &T, y: &T, add: Option<&T>) -> Result<T> {
        adapter::column_dot(&self.cx, x, y, add)
    }

    fn dropout(&self, x: &T, rate: f32, seed: u64) -> Result<T> {
        adapter::dropout(&self.cx, x, rate, seed)
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
        backward::ada_layer_norm(&self.cx, dy, x, scale, groups, eps, add)
    }

    fn norm_rope_backward(
        &self,
        dy: &T,
        x: &T,
        weight: Option<&T>,
        rope: &RopeTable<T>,
        eps: f32,
    ) -> Result<T> {
        backward::norm_rope(&self.cx, dy, x, weight, rope, eps)
    }

    fn swiglu_backward(&self, dy: &T, x: &T) -> Result<T> {
        shapes::swiglu_backward(dy, x)?;
        let [_, dx] = backward::concat_swiglu(&self.cx, dy, x)?;
        Ok(dx)
    }

    fn concat_swiglu(&self, left: &T, x: &T) -> Result<T> {
        shapes::concat_swiglu(left, x)?;
        elementwise::concat_swiglu(&self.cx, Some(left), x)
    }

    fn concat_swiglu_backward(&self, dy: &T, x: &T) -> Result<[T; 2]> {
        backward::concat_swiglu(&self.cx, dy, x)
    }

    fn gate_rows(&self, x: &T, gate: &T, groups: &RowGroups) -> Result<T> {
        backward::gate_rows(&self.cx, x, gate, groups, None)
    }

    fn gated_add(&self, x: &T, gate: &T, groups: &RowGroups, residual: &T) -> Result<T> {
        backward::gate_rows(&self.cx, x, gate, groups, Some(residual))
    }

    fn attention_lse(&self, q: &[&T], k: &[&T], v: &[&T], spec: &AttentionSpec) -> Result<[T; 2]> {
        attention::attention_lse(&self.cx, q, k, v, spec)
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
        attention::attention_backward(&self.cx, dout, [q, k, v], out, lse, spec)
    }

    fn squared_error(&self, x: &T, y: &T, scale: f32) -> Result<[T; 2]> {
        backward::squared_error(&self.cx, x, y, scale)
    }

    fn sum_squares(&self, xs: &[&T]) -> Result<T> {
        optimizer::sum_squares(&self.cx, xs)
    }

    fn adamw(&self, tensors: &mut [AdamWTensor<'_, T>], step: &AdamWStep) -> Result<()> {
        optimizer::adamw(&self.cx, tensors, step)
    }

    fn adamw_8bit(
        &self,
        tensors: &mut [QuantizedAdamWTensor<'_, T, CudaQuantized>],
        step: &AdamWStep,
    ) -> Result<()> {
        optimizer::adamw_8bit(&self.cx, tensors, step)
    }

    fn prodigy_moments(&self, tensors: &mut [ProdigyTensor<'_, T>], step: &ProdigyStep) -> Result<T> {
        optimizer::prodigy_moments(&self.cx, tensors, step)
    }

    fn prodigy_update(
        &self,
        tensors: &mut [ProdigyTensor<'_, T>],
        lr: f32,
        decay: f32,
        eps: f32,
    ) -> Result<()> {
        optimizer::prodigy_update(&self.cx, tensors, lr, decay, eps)
    }
}

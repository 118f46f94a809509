//! [`TrainingBackend`]: plain loops from its formulas, sums in f64.

mod adapter;
mod attention;
mod backward;
mod optimizer;

use kiln_tensor::HostTensor;

use super::linear::Linear;
use super::{Reference, tensor, values};
use crate::training::{
    AdamWStep, AdamWTensor, LowRank, ProdigyStep, ProdigyTensor, Quantized8, QuantizedAdamWTensor, shapes,
};
use crate::{AttentionSpec, Result, RopeTable, RowGroups, TrainingBackend};

type T = HostTensor;

/// `values`, plus those of `add`.
fn plus(mut values: Vec<f64>, add: Option<&T>) -> Result<Vec<f64>> {
    if let Some(add) = add {
        values.iter_mut().zip(super::values(add)?).for_each(|(value, add)| *value += add);
    }
    Ok(values)
}

impl TrainingBackend for Reference {
    type Quantized = Quantized8;

    fn upload_quantized(&self, host: &Quantized8) -> Result<Quantized8> {
        shapes::upload_quantized(host)?;
        Ok(host.clone())
    }

    fn download_quantized(&self, x: &Quantized8) -> Result<Quantized8> {
        Ok(x.clone())
    }

    fn split_columns(&self, x: &T, widths: &[usize]) -> Result<Vec<T>> {
        adapter::split_columns(x, widths)
    }

    fn linear_backward(&self, dys: &[&T], w: &Linear, add: Option<&T>) -> Result<T> {
        adapter::linear_backward(dys, w, add)
    }

    fn matmul_nt(&self, x: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
        adapter::matmul_nt(x, w, scale, add)
    }

    fn matmul_nn(&self, dy: &T, w: &T, scale: f32, add: Option<&T>) -> Result<T> {
        adapter::matmul_nn(dy, w, scale, add)
    }

    fn matmul_tn(&self, dy: &T, x: &T, scale: f32, add: Option<&T>) -> Result<T> {
        adapter::matmul_tn(dy, x, scale, add)
    }

    fn row_norms(&self, w: &Linear, updates: &[LowRank<'_, T>]) -> Result<T> {
        adapter::row_norms(w, updates)
    }

    fn mix_rows(&self, x: &T, a: &T, transposed: bool) -> Result<T> {
        adapter::mix_rows(x, a, transposed)
    }

    fn mix_rows_gradient(&self, dy: &T, x: &T, size: [usize; 2], scale: f32, add: Option<&T>) -> Result<T> {
        adapter::mix_rows_gradient(dy, x, size, scale, add)
    }

    fn column_dot(&self, x: &T, y: &T, add: Option<&T>) -> Result<T> {
        adapter::column_dot(x, y, add)
    }

    fn dropout(&self, x: &T, rate: f32, seed: u64) -> Result<T> {
        adapter::dropout(x, rate, seed)
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
        backward::ada_layer_norm(dy, x, scale, groups, eps, add)
    }

    fn norm_rope_backward(
        &self,
        dy: &T,
        x: &T,
        weight: Option<&T>,
        rope: &RopeTable<T>,
        eps: f32,
    ) -> Result<T> {
        backward::norm_rope(dy, x, weight, rope, eps)
    }

    fn swiglu_backward(&self, dy: &T, x: &T) -> Result<T> {
        backward::swiglu(dy, x)
    }

    fn gate_rows(&self, x: &T, gate: &T, groups: &RowGroups) -> Result<T> {
        backward::gate_rows(x, gate, groups)
    }

    fn attention_lse(&self, q: &[&T], k: &[&T], v: &[&T], spec: &AttentionSpec) -> Result<[T; 2]> {
        attention::forward(q, k, v, spec)
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
        attention::backward(dout, [q, k, v], out, lse, spec)
    }

    fn squared_error(&self, x: &T, y: &T, scale: f32) -> Result<[T; 2]> {
        backward::squared_error(x, y, scale)
    }

    fn sum_squares(&self, xs: &[&T]) -> Result<T> {
        backward::sum_squares(xs)
    }

    fn adamw(&self, tensors: &mut [AdamWTensor<'_, T>], step: &AdamWStep) -> Result<()> {
        optimizer::adamw(tensors, step)
    }

    fn adamw_8bit(
        &self,
        tensors: &mut [QuantizedAdamWTensor<'_, T, Quantized8>],
        step: &AdamWStep,
    ) -> Result<()> {
        optimizer::adamw_8bit(tensors, step)
    }

    fn prodigy_moments(&self, tensors: &mut [ProdigyTensor<'_, T>], step: &ProdigyStep) -> Result<T> {
        optimizer::prodigy_moments(tensors, step)
    }

    fn prodigy_update(
        &self,
        tensors: &mut [ProdigyTensor<'_, T>],
        lr: f32,
        decay: f32,
        eps: f32,
    ) -> Result<()> {
        optimizer::prodigy_update(tensors, lr, decay, eps)
    }
}

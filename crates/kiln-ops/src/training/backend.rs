//! The operations, and those of linear layers with low-rank updates as one product after the other.

use kiln_tensor::{DType, HostTensor, Shape};

use super::args::{
    AdamWStep, AdamWTensor, AdaptedOutput, LowRank, LowRankGradient, ProdigyStep, ProdigyTensor,
    QuantizedAdamWTensor,
};
use super::code_book::Quantized8;
use super::shapes;
#[cfg(doc)]
use super::{BLOCK, CodeBook, keeps};
use crate::{AttentionSpec, Backend, Error, Result, RopeTable, RowGroups, Tensor};

operations! {$
    /// Writes the operations of [`TrainingBackend`] in an `impl` block, as [`backend_methods!`](crate::backend_methods) does.
    macro training_methods;

    /// Gradients and optimizer steps.
    pub trait TrainingBackend: Backend;

    own {
        /// Optimizer state in 8 bits: a code of a [`CodeBook`] per element, and the largest magnitude of every [`BLOCK`]
        /// elements, so that `value = book[code] · largest`.
        type Quantized: Send + Sync;
    }

    required {
        /// Copies 8-bit state from the host.
        fn upload_quantized(&self, host: &Quantized8) -> Result<Self::Quantized>;

        /// Copies 8-bit state to the host.
        fn download_quantized(&self, x: &Self::Quantized) -> Result<Quantized8>;

        /// The columns of `x`, `[rows, Σ widths]`, as tensors of these widths.
        fn split_columns(&self, x: &Self::Tensor, widths: &[usize]) -> Result<Vec<Self::Tensor>>;

        /// `dx = add + concat_columns(dys) · W`: the gradient of [`Backend::linear`] by its input.
        ///
        /// `dys`: `[rows, out_i]` with `Σ out_i = out`; `W`: `[out, in]`, with its (dequantized) values whatever its stored form,
        /// so that the gradient of an int8 or fp8 matmul ignores the rounding of its input. The weight must not have LoRA deltas.
        ///
        /// The gradient of an fp8 matmul is one, too: with `W = scale · w` by rows, the rows of `dy · scale` (in f32) are
        /// quantized as [`Backend::load_weight`] says and multiplied with `w`.
        fn linear_backward(
            &self,
            dys: &[&Self::Tensor],
            w: &Self::Weight,
            add: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor>;

        /// `add + scale · x · wᵀ`. `x`: `[rows, in]`; `w`: `[out, in]`, a parameter; result `[rows, out]`, of `x`'s dtype.
        fn matmul_nt(
            &self,
            x: &Self::Tensor,
            w: &Self::Tensor,
            scale: f32,
            add: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor>;

        /// `add + scale · dy · w`: the gradient of [`TrainingBackend::matmul_nt`] by `x`. `dy`: `[rows, out]`; result
        /// `[rows, in]`, of `dy`'s dtype.
        fn matmul_nn(
            &self,
            dy: &Self::Tensor,
            w: &Self::Tensor,
            scale: f32,
            add: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor>;

        /// `add + scale · dyᵀ · x`: the gradient of [`TrainingBackend::matmul_nt`] by `w`. `dy`: `[rows, out]`; `x`: `[rows, in]`;
        /// result and `add` f32 `[out, in]`.
        fn matmul_tn(
            &self,
            dy: &Self::Tensor,
            x: &Self::Tensor,
            scale: f32,
            add: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor>;

        /// The norm of each row of `W + Σ scale · up · down`, with the updates in their rows `first..first + n`: f32 `[out]`. `W`
        /// has its (dequantized) values.
        fn row_norms(&self, w: &Self::Weight, updates: &[LowRank<'_, Self::Tensor>]) -> Result<Self::Tensor>;

        /// `y[b · out + i] = Σ_j a[i, j] · x[b · in + j]` over rows, for every block `b` of rows: a product with `a` from the left,
        /// block by block. `a`: `[out, in]`, a parameter; `x`: `[blocks · in, dim]`; result `[blocks · out, dim]`. With
        /// `transposed`, `aᵀ` instead of `a`: the gradient by `x`.
        fn mix_rows(&self, x: &Self::Tensor, a: &Self::Tensor, transposed: bool) -> Result<Self::Tensor>;

        /// The gradient of [`TrainingBackend::mix_rows`] by `a`: `add[i, j] + scale · Σ_b Σ_c dy[b · out + i, c] · x[b · in + j, c]`,
        /// f32 `[out, in]` with `size = [out, in]`.
        fn mix_rows_gradient(
            &self,
            dy: &Self::Tensor,
            x: &Self::Tensor,
            size: [usize; 2],
            scale: f32,
            add: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor>;

        /// `add + Σ_rows x * y`: f32 `[dim]`. `x`, `y`: `[rows, dim]`.
        fn column_dot(
            &self,
            x: &Self::Tensor,
            y: &Self::Tensor,
            add: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor>;

        /// `x / (1 - rate)` where [`keeps`]`(seed, element, rate)`, else 0; `element` is the row-major index. Its gradient is the
        /// same function of `dy`.
        fn dropout(&self, x: &Self::Tensor, rate: f32, seed: u64) -> Result<Self::Tensor>;

        /// The gradient of [`Backend::ada_layer_norm`] by `x`. With `n = (x - mean) · r`, `r = 1 / sqrt(variance + eps)` and
        /// `g = dy * (1 + scale[group of row])`: `dx = add + r · (g - mean(g) - n · mean(g * n))`, means over the row.
        fn ada_layer_norm_backward(
            &self,
            dy: &Self::Tensor,
            x: &Self::Tensor,
            scale: &Self::Tensor,
            groups: &RowGroups,
            eps: f32,
            add: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor>;

        /// The gradient of [`Backend::norm_rope`] by `x`: `dy` rotated by `-θ`, times `weight`, is `g`; with
        /// `r = 1 / sqrt(mean(x²) + eps)` and `n = x · r`: `dx = r · (g - n · mean(g * n))`, means over the head. Without a
        /// weight, `dx` is `dy` rotated back.
        fn norm_rope_backward(
            &self,
            dy: &Self::Tensor,
            x: &Self::Tensor,
            weight: Option<&Self::Tensor>,
            rope: &RopeTable<Self::Tensor>,
            eps: f32,
        ) -> Result<Self::Tensor>;

        /// The gradient of [`Backend::swiglu`]. With `x = [a, u]` and `σ = 1 / (1 + exp(-a))`:
        /// `dx = [dy · u · σ · (1 + a · (1 - σ)), dy · a · σ]`.
        fn swiglu_backward(&self, dy: &Self::Tensor, x: &Self::Tensor) -> Result<Self::Tensor>;

        /// `gate[group of row] * x`: the gradient of [`Backend::linear_gated_add`] by its product. `x`: `[rows, dim]`; `gate`:
        /// `[groups, dim]`.
        fn gate_rows(&self, x: &Self::Tensor, gate: &Self::Tensor, groups: &RowGroups) -> Result<Self::Tensor>;

        /// [`Backend::attention`], and the logarithm of each query's and head's sum of exponentials,
        /// `lse = log Σ_keys exp(q · k / sqrt(head_dim))`: f32 `[queries, heads]`.
        fn attention_lse(
            &self,
            q: &[&Self::Tensor],
            k: &[&Self::Tensor],
            v: &[&Self::Tensor],
            spec: &AttentionSpec,
        ) -> Result<[Self::Tensor; 2]>;

        /// The gradients of [`Backend::attention`] by `q`, `k` and `v`, each as one tensor, without stored scores. Per head, with
        /// `s = 1 / sqrt(head_dim)`, `p = exp(s · q · kᵀ - lse)` and `δ = Σ_columns dout * out`:
        /// `dv = pᵀ · dout`, `ds = p * (dout · vᵀ - δ)`, `dq = s · ds · k`, `dk = s · dsᵀ · q`.
        ///
        /// `dout`: row blocks like `q`; `out` and `lse` as [`TrainingBackend::attention_lse`] returned them. Masked keys have
        /// `p = 0`. Query heads that share a key head add up in its gradients.
        #[expect(clippy::too_many_arguments, reason = "all operands of the forward pass, and its result")]
        fn attention_backward(
            &self,
            dout: &[&Self::Tensor],
            q: &[&Self::Tensor],
            k: &[&Self::Tensor],
            v: &[&Self::Tensor],
            out: &Self::Tensor,
            lse: &Self::Tensor,
            spec: &AttentionSpec,
        ) -> Result<[Self::Tensor; 3]>;

        /// `loss = scale · Σ (x - y)²`, f32 `[1, 1]`, and its gradient `dx = 2 · scale · (x - y)`. Equal shapes.
        fn squared_error(&self, x: &Self::Tensor, y: &Self::Tensor, scale: f32) -> Result<[Self::Tensor; 2]>;

        /// `Σ x²` over all elements of all tensors, which are f32: f32 `[1, 1]`.
        fn sum_squares(&self, xs: &[&Self::Tensor]) -> Result<Self::Tensor>;

        /// One step of AdamW for each tensor, as torch does it. With `g = grad_scale · grad`:
        /// `m = β₁ · m + (1 - β₁) · g`, `v = β₂ · v + (1 - β₂) · g²`,
        /// `param = param · (1 - lr · decay) - lr / (1 - β₁ᵗ) · m / (sqrt(v) / sqrt(1 - β₂ᵗ) + eps)`.
        fn adamw(&self, tensors: &mut [AdamWTensor<'_, Self::Tensor>], step: &AdamWStep) -> Result<()>;

        /// [`TrainingBackend::adamw`] with 8-bit moments: both are read, updated, used unrounded for `param`, and stored with the
        /// nearest code; `m` with [`CodeBook::signed`], `v` with [`CodeBook::unsigned`], where a `v` above 0 stays above 0.
        fn adamw_8bit(
            &self,
            tensors: &mut [QuantizedAdamWTensor<'_, Self::Tensor, Self::Quantized>],
            step: &AdamWStep,
        ) -> Result<()>;

        /// The first half of a step of Prodigy, for all tensors. With `g = grad_scale · grad` and the distance `d`:
        /// `m = β₁ · m + d · (1 - β₁) · g`, `v = β₂ · v + d² · (1 - β₂) · g²`, `s = β₃ · s + s_factor · g`.
        /// Returns `[Σ g · (start - param), Σ |s|]` over all elements, f32 `[1, 2]`.
        fn prodigy_moments(
            &self,
            tensors: &mut [ProdigyTensor<'_, Self::Tensor>],
            step: &ProdigyStep,
        ) -> Result<Self::Tensor>;

        /// The second half: `param = param · (1 - lr · decay) - lr · m / (sqrt(v) + eps)`.
        fn prodigy_update(
            &self,
            tensors: &mut [ProdigyTensor<'_, Self::Tensor>],
            lr: f32,
            decay: f32,
            eps: f32,
        ) -> Result<()>;
    }

    provided {
        /// A tensor of zeros, f32 or bf16.
        fn zeros(&self, shape: Shape, dtype: DType) -> Result<Self::Tensor> {
            self.upload(&HostTensor::zeros(shape), dtype)
        }

        /// [`Backend::linear`] with low-rank updates: `y = x · Wᵀ + bias`, then for each update
        /// `y[.., first..first + n] += scale · (x' · downᵀ) · upᵀ`, with `x'` the update's own input, or `x`. Returns the columns
        /// of `y` as tensors of `widths`, and the inner products `x' · downᵀ`.
        fn linear_low_rank(
            &self,
            x: &Self::Tensor,
            w: &Self::Weight,
            updates: &[LowRank<'_, Self::Tensor>],
            widths: &[usize],
        ) -> Result<AdaptedOutput<Self::Tensor>> {
            let y = self.linear(x, w)?;
            add_low_rank(self, x, y, updates, widths)
        }

        /// The gradients of [`TrainingBackend::linear_low_rank`] by every `down` and `up`:
        /// `d_up = scale · dyᵀ · inner`, `d_inner = scale · dy · up`, `d_down = d_innerᵀ · x'`, with the update's columns of `dy`.
        /// Also returns `d_inner`, from which [`TrainingBackend::matmul_nn`] with `down` gives the gradient by `x'`.
        ///
        /// `dys`: the columns of `dy` in tensors, each of whole updates or within one; `add`: earlier gradients.
        fn low_rank_backward(
            &self,
            dys: &[&Self::Tensor],
            x: &Self::Tensor,
            updates: &[LowRank<'_, Self::Tensor>],
            inner: &[Self::Tensor],
            add: &[Option<[&Self::Tensor; 2]>],
        ) -> Result<Vec<LowRankGradient<Self::Tensor>>> {
            low_rank_backward(self, dys, x, updates, inner, add)
        }

        /// The columns of `left` and of [`Backend::swiglu`] of `x`, side by side.
        fn concat_swiglu(&self, left: &Self::Tensor, x: &Self::Tensor) -> Result<Self::Tensor> {
            self.concat_columns(&[left, &self.swiglu(x)?])
        }

        /// The gradients of [`TrainingBackend::concat_swiglu`] by `left` and `x`.
        fn concat_swiglu_backward(&self, dy: &Self::Tensor, x: &Self::Tensor) -> Result<[Self::Tensor; 2]> {
            let (left, cols) = shapes::concat_swiglu_backward(dy, x)?;
            let parts = self.split_columns(dy, &[left, cols])?;
            Ok([parts[0].clone(), self.swiglu_backward(&parts[1], x)?])
        }

        /// `residual + gate[group of row] * x`.
        fn gated_add(
            &self,
            x: &Self::Tensor,
            gate: &Self::Tensor,
            groups: &RowGroups,
            residual: &Self::Tensor,
        ) -> Result<Self::Tensor> {
            self.add(residual, &self.gate_rows(x, gate, groups)?)
        }
    }
}

/// Adds low-rank updates to `y`, and splits it.
fn add_low_rank<B: TrainingBackend>(
    b: &B,
    x: &B::Tensor,
    y: B::Tensor,
    updates: &[LowRank<'_, B::Tensor>],
    widths: &[usize],
) -> Result<AdaptedOutput<B::Tensor>> {
    let out = y.shape().last();
    shapes::low_rank(x, updates, out)?;
    let inner = updates
        .iter()
        .map(|update| b.matmul_nt(update.input.unwrap_or(x), update.down, 1.0, None))
        .collect::<Result<Vec<_>>>()?;
    if let ([update], true) = (updates, covers(updates, out)) {
        let y = b.matmul_nt(&inner[0], update.up, update.scale, Some(&y))?;
        return Ok(AdaptedOutput { ys: split(b, y, widths)?, inner });
    }
    let mut ys = split(b, y, widths)?;
    let mut first = 0;
    for (y, width) in ys.iter_mut().zip(widths) {
        for (update, inner) in updates.iter().zip(&inner) {
            let Some(rows) = update.rows_within(first, *width)? else { continue };
            *y = b.matmul_nt(inner, &b.slice_rows(update.up, rows)?, update.scale, Some(&*y))?;
        }
        first += width;
    }
    Ok(AdaptedOutput { ys, inner })
}

fn split<B: TrainingBackend>(b: &B, y: B::Tensor, widths: &[usize]) -> Result<Vec<B::Tensor>> {
    if widths.len() == 1 && widths[0] == y.shape().last() {
        return Ok(vec![y]);
    }
    b.split_columns(&y, widths)
}

fn covers<T: Tensor>(updates: &[LowRank<'_, T>], out: usize) -> bool {
    updates.iter().all(|update| update.first == 0 && update.up.shape().rows() == out)
}

/// [`TrainingBackend::low_rank_backward`] as one product after the other.
pub fn low_rank_backward<B: TrainingBackend>(
    b: &B,
    dys: &[&B::Tensor],
    x: &B::Tensor,
    updates: &[LowRank<'_, B::Tensor>],
    inner: &[B::Tensor],
    add: &[Option<[&B::Tensor; 2]>],
) -> Result<Vec<LowRankGradient<B::Tensor>>> {
    let out = dys.iter().map(|dy| dy.shape().last()).sum();
    shapes::low_rank(x, updates, out)?;
    let mut gradients = Vec::with_capacity(updates.len());
    for ((update, inner), add) in updates.iter().zip(inner).zip(add) {
        let (mut first, mut ups, mut d_inner) = (0, Vec::new(), None);
        for dy in dys {
            let width = dy.shape().last();
            if let Some(rows) = update.rows_within(first, width)? {
                let whole = rows.len() == update.up.shape().rows();
                let up = if whole { update.up.clone() } else { b.slice_rows(update.up, rows.clone())? };
                let earlier = match add {
                    Some([_, up]) if whole => Some((*up).clone()),
                    Some([_, up]) => Some(b.slice_rows(up, rows)?),
                    None => None,
                };
                ups.push(b.matmul_tn(dy, inner, update.scale, earlier.as_ref())?);
                d_inner = Some(b.matmul_nn(dy, &up, update.scale, d_inner.as_ref())?);
            }
            first += width;
        }
        let Some(d_inner) = d_inner else {
            let what = format!("no gradient for the update of columns {}..", update.first);
            return Err(Error::Arguments { op: "low_rank_backward", what });
        };
        let up = if ups.len() == 1 { ups.remove(0) } else { b.concat_rows(&ups.iter().collect::<Vec<_>>())? };
        let down = b.matmul_tn(&d_inner, update.input.unwrap_or(x), 1.0, add.map(|[down, _]| down))?;
        gradients.push(LowRankGradient { down, up, inner: d_inner });
    }
    Ok(gradients)
}

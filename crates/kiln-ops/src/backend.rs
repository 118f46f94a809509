use std::ops::Range;

use kiln_tensor::{DType, Delta, HostTensor, LinearParts, Shape};

use crate::{Activation, AttentionSpec, ConvGeometry, Error, Groups, Result, RopeTable};

/// What a tensor tells about itself, wherever it lives.
pub trait Tensor: Clone + Send + Sync {
    /// The dimensions.
    fn shape(&self) -> &Shape;
    /// The element type: f32 or bf16.
    fn dtype(&self) -> DType;
}

/// Something a backend is still working on; calling it waits for the result. It may be called on any thread.
pub type Later<T> = Box<dyn FnOnce() -> Result<T> + Send>;

/// Where a weight lies between its uses ([`Backend::weight`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// On the device.
    Device,
    /// In the host's memory, from where it is copied to the device whenever it is used.
    Host,
}

/// What becomes of work that a backend asks for ([`Backend::replay`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// It is done, and its results are used.
    Now,
    /// It is only written down, to be done later without asking again.
    Recorded,
}

/// The operations FLUX.2 is made of.
///
/// Tensors are row-major and immutable; an operation gives a new one. **Activations** are f32 or bf16 and the result
/// has the dtype of the first activation; all activations of one call have the same dtype. **Parameters** (norm
/// weights, modulations, cosines, biases) are f32 tensors. Sums are taken in f32 or better whatever the dtypes.
/// Arguments that don't fit are [`Error::Arguments`](crate::Error::Arguments), never a panic.
///
/// A backend is a handle: clones share the device, its memory and its threads.
pub trait Backend: Clone + Send + Sync {
    /// A tensor on this backend.
    type Tensor: Tensor;
    /// A linear layer's weight in whatever form this backend multiplies with: dense, quantised, with LoRA deltas.
    type Weight: Send + Sync;
    /// A convolution's kernel and bias, arranged for this backend.
    type Conv: Send + Sync;
    /// What is kept of work that is asked for again and again ([`Backend::replay`]); `()` where nothing is.
    type Replays: Default + Send + Sync;

    /// Name for messages, such as `cpu (avx512)`.
    fn name(&self) -> String;

    /// What the last bits of results depend on: backends of the same program with equal words give equal results.
    fn numerics(&self) -> String {
        self.name()
    }

    /// Whether weights are used where the host has them, so that reading ahead in a mapped file helps.
    fn reads_host_weights(&self) -> bool {
        false
    }

    /// Up to so many rows, products of more rows are known to cost less a row: below it, pictures are painted together. 0
    /// where nobody has measured it.
    fn rows_at_once(&self) -> usize {
        0
    }

    /// Waits until everything asked for so far is done; backends that do it at once have nothing to wait for.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// `work` done to `inputs`. A backend may record it, and from then on do what was recorded instead, where asking for every
    /// operation takes longer than doing it; the results are the same to the last bit.
    ///
    /// Work of one `key` and inputs of equal shapes and dtypes is the same operations every time, on the backend and the inputs
    /// that it is handed: it uses no other backend, and gives back a tensor that it made. Tensors and weights that it reads
    /// beside its inputs are read again every time, as they were when it was recorded; the recording keeps them. It neither
    /// uploads nor downloads. It may be asked for twice: what was [recorded](Run::Recorded) has not been done.
    fn replay<E: From<Error>>(
        &self,
        replays: &Self::Replays,
        key: &[usize],
        inputs: &[&Self::Tensor],
        mut work: impl FnMut(&Self, Run, &[&Self::Tensor]) -> Result<Self::Tensor, E>,
    ) -> Result<Self::Tensor, E> {
        let _ = (replays, key);
        work(self, Run::Now, inputs)
    }

    /// Copies a float tensor from the host, converted to `dtype` (f32 or bf16).
    fn upload(&self, host: &HostTensor, dtype: DType) -> Result<Self::Tensor>;

    /// Copies a tensor to the host with the dtype it has; waits for the work that makes it.
    fn download(&self, x: &Self::Tensor) -> Result<HostTensor>;

    /// `round(clamp(scale · x + shift, 0, 1) · 255)` on the host, ties to even: a picture's values as its bytes. Everything is
    /// rounded to f32 on the way; what is not a number becomes 0. Waits as [`Backend::download`] does.
    fn download_bytes(&self, x: &Self::Tensor, scale: f32, shift: f32) -> Result<Vec<u8>>;

    /// [`Backend::download`] without the wait: the copy is in order with the calls before it, and calls after it don't hold it up.
    fn download_later(&self, x: &Self::Tensor) -> Result<Later<HostTensor>> {
        let host = self.download(x)?;
        Ok(Box::new(move || Ok(host)))
    }

    /// [`Backend::download_bytes`] without the wait.
    fn download_bytes_later(&self, x: &Self::Tensor, scale: f32, shift: f32) -> Result<Later<Vec<u8>>> {
        let bytes = self.download_bytes(x, scale, shift)?;
        Ok(Box::new(move || Ok(bytes)))
    }

    /// Waits, when called, for all work asked for before this and for none after it.
    fn fence(&self) -> Result<Later<()>> {
        Ok(Box::new(|| Ok(())))
    }

    /// Takes over a linear layer. The host bytes may be a mapped file and are kept, not copied, where that is possible.
    ///
    /// Dense matrices are the weight, and packed ones the values they stand for. Integers with a scale for every row mean
    /// a product in integers: with `m` the largest absolute value in a row of `x` (side by side with the others, where `x` is a list),
    /// `q = round(x · (127 / m))` in f32, ties to even, and `x · Wᵀ = Σ q · w · (m / 127) · scale`, the sum exact. Bias and
    /// deltas are as for a float weight; deltas take `x` as it is. [`int8`](crate::int8) has the rounding, what becomes of
    /// rows that vanish or hold no numbers, and the widest such weight.
    ///
    /// Parts [in fp8](LinearParts::in_fp8) mean a product in 8-bit floats: rows of `x` and rows of the weight, each with `m` its largest
    /// absolute value, become `q = e4m3(x · (448 / m))`, and `x · Wᵀ = Σ q · w · (m / 448) · (n / 448)` with `n` that of the
    /// weight's row; the sum may be kept in as few as 14 bits. [`fp8`](crate::fp8) has the rounding. Bias and deltas are as above.
    /// Packed matrices that [are such numbers](kiln_tensor::packed::Packed::is_fp8) keep them and their scales.
    ///
    /// `residency` says where it lies between its uses; the results are the same. Where all weights lie in the host's memory it
    /// means nothing.
    fn weight(&self, parts: LinearParts, residency: Residency) -> Result<Self::Weight>;

    /// The same layer with these updates instead of its own; what they are laid over is shared, not copied.
    fn with_deltas(&self, w: &Self::Weight, deltas: Vec<Delta>) -> Result<Self::Weight>;

    /// Takes over a convolution: `kernel` `[out, in, height, width]`, `bias` `[out]`.
    fn conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<Self::Conv>;

    /// The same values under another shape of as many elements.
    fn reshape(&self, x: &Self::Tensor, shape: Shape) -> Result<Self::Tensor>;

    /// The same values as f32 or bf16 (rounded to nearest even).
    fn cast(&self, x: &Self::Tensor, dtype: DType) -> Result<Self::Tensor>;

    /// Entries `range` of the first axis.
    fn slice_rows(&self, x: &Self::Tensor, range: Range<usize>) -> Result<Self::Tensor>;

    /// `[rows_i, dim]` tensors below each other: `[Σ rows_i, dim]`.
    fn concat_rows(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

    /// `[rows, dim_i]` tensors side by side: `[rows, Σ dim_i]`.
    fn concat_columns(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

    /// `x · Wᵀ + bias`. `x`: `[rows, in]`; `w`: `[out, in]`; result `[rows, out]`.
    fn linear(&self, x: &Self::Tensor, w: &Self::Weight) -> Result<Self::Tensor>;

    /// [`Backend::linear`] with its columns cut into tensors of these widths, which add up to `out`.
    fn linear_split<const N: usize>(
        &self,
        x: &Self::Tensor,
        w: &Self::Weight,
        widths: [usize; N],
    ) -> Result<[Self::Tensor; N]>;

    /// `residual + gate[group of row] * (concat_columns(xs) · Wᵀ + bias)`; a missing gate is 1.
    ///
    /// `xs`: `[rows, in_i]` with `Σ in_i = in`; `residual`: `[rows, out]`; `gate`: `[groups, out]`.
    fn linear_gated_add(
        &self,
        xs: &[&Self::Tensor],
        w: &Self::Weight,
        gate: Option<(&Self::Tensor, &Groups)>,
        residual: &Self::Tensor,
    ) -> Result<Self::Tensor>;

    /// [`Backend::linear_gated_add`] of [`Backend::swiglu`] of `gate_up`, with `beside` on its left.
    fn swiglu_gated_add(
        &self,
        beside: Option<&Self::Tensor>,
        gate_up: &Self::Tensor,
        w: &Self::Weight,
        gate: Option<(&Self::Tensor, &Groups)>,
        residual: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        let x = self.swiglu(gate_up)?;
        match beside {
            Some(beside) => self.linear_gated_add(&[beside, &x], w, gate, residual),
            None => self.linear_gated_add(&[&x], w, gate, residual),
        }
    }

    /// `layer_norm(x) * (1 + scale[group of row]) + shift[group of row]`, the norm without weights:
    /// `(x - mean) / sqrt(variance + eps)` over the last axis, biased variance.
    ///
    /// `x`: `[rows, dim]`; `scale`, `shift`: `[groups, dim]`.
    fn ada_layer_norm(
        &self,
        x: &Self::Tensor,
        scale: &Self::Tensor,
        shift: &Self::Tensor,
        groups: &Groups,
        eps: f32,
    ) -> Result<Self::Tensor>;

    /// [`Backend::linear_split`] of [`Backend::ada_layer_norm`] with `[scale, shift]`: the same bits as from the two.
    fn ada_linear_split<const N: usize>(
        &self,
        x: &Self::Tensor,
        [scale, shift]: [&Self::Tensor; 2],
        groups: &Groups,
        eps: f32,
        w: &Self::Weight,
        widths: [usize; N],
    ) -> Result<[Self::Tensor; N]> {
        let x = self.ada_layer_norm(x, scale, shift, groups, eps)?;
        self.linear_split(&x, w, widths)
    }

    /// `x / sqrt(mean(x²) + eps) * weight` over the last axis. `x`: `[rows, dim]`; `weight`: `[dim]`.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Tensor, eps: f32) -> Result<Self::Tensor>;

    /// [`Backend::rms_norm`] of every head, then the rotary embedding: with `(a, b)` a pair of a head and `θ` its angle,
    /// `(a·cos θ - b·sin θ, a·sin θ + b·cos θ)`.
    ///
    /// `x`: `[tokens, heads · head_dim]`; `weight`: `[head_dim]`; the table has a row a token.
    fn norm_rope(
        &self,
        x: &Self::Tensor,
        weight: &Self::Tensor,
        rope: &RopeTable<Self>,
        eps: f32,
    ) -> Result<Self::Tensor>
    where
        Self: Sized;

    /// [`Backend::norm_rope`] of the queries and of the keys of the same tokens.
    fn qk_norm_rope(
        &self,
        [q, k]: [&Self::Tensor; 2],
        [q_weight, k_weight]: [&Self::Tensor; 2],
        rope: &RopeTable<Self>,
        eps: f32,
    ) -> Result<[Self::Tensor; 2]>
    where
        Self: Sized,
    {
        Ok([self.norm_rope(q, q_weight, rope, eps)?, self.norm_rope(k, k_weight, rope, eps)?])
    }

    /// `softmax(q·kᵀ / sqrt(head_dim)) · v`, head by head, the keys a query does not see left out.
    ///
    /// Each of `q`, `k`, `v` is a list of row blocks read as one tensor: `q` `[queries, heads · head_dim]`, `k` and `v`
    /// `[keys, kv_heads · head_dim]`. Result `[queries, heads · head_dim]`.
    fn attention(
        &self,
        q: &[&Self::Tensor],
        k: &[&Self::Tensor],
        v: &[&Self::Tensor],
        spec: &AttentionSpec,
    ) -> Result<Self::Tensor>;

    /// `silu(first half of the columns) * second half`. `x`: `[rows, 2n]`; result `[rows, n]`.
    fn swiglu(&self, x: &Self::Tensor) -> Result<Self::Tensor>;

    /// The function on every element.
    fn activation(&self, x: &Self::Tensor, f: Activation) -> Result<Self::Tensor>;

    /// `x + y`, equal shapes.
    fn add(&self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor>;

    /// `x + s · y`, equal shapes: one Euler step.
    fn add_scaled(&self, x: &Self::Tensor, y: &Self::Tensor, s: f32) -> Result<Self::Tensor>;

    /// `t · y + (1 - t) · x`, equal shapes: `x` noised with `y` to level `t`.
    fn lerp(&self, x: &Self::Tensor, y: &Self::Tensor, t: f32) -> Result<Self::Tensor>;

    /// `u + g · (c - u)`, equal shapes: classifier-free guidance.
    fn guide(&self, c: &Self::Tensor, u: &Self::Tensor, g: f32) -> Result<Self::Tensor>;

    /// `(1 - mask[row]) · x + mask[row] · y`. `x`, `y`: `[rows, dim]`; `mask`: `[rows]`, a parameter.
    fn blend_rows(&self, x: &Self::Tensor, y: &Self::Tensor, mask: &Self::Tensor) -> Result<Self::Tensor>;

    /// `x * scale + shift` with one scale and shift a column. `x`: `[…, dim]`; `scale`, `shift`: `[dim]`.
    fn affine(&self, x: &Self::Tensor, scale: &Self::Tensor, shift: &Self::Tensor) -> Result<Self::Tensor>;

    /// `[h, w, c]` to `[h/2, w/2, 4c]`: channel `4c + 2i + j` is channel `c` of pixel `(i, j)` of the 2×2 patch.
    fn space_to_depth(&self, x: &Self::Tensor) -> Result<Self::Tensor>;

    /// The inverse of [`Backend::space_to_depth`]: `[h, w, 4c]` to `[2h, 2w, c]`.
    fn depth_to_space(&self, x: &Self::Tensor) -> Result<Self::Tensor>;

    /// `f(group_norm(x) * weight + bias)`, statistics over all pixels and `c / groups` consecutive channels, biased
    /// variance. `x`: `[h, w, c]`; `weight`, `bias`: `[c]`.
    fn group_norm(
        &self,
        x: &Self::Tensor,
        groups: usize,
        weight: &Self::Tensor,
        bias: &Self::Tensor,
        eps: f32,
        f: Option<Activation>,
    ) -> Result<Self::Tensor>;

    /// Cross-correlation as in torch's `conv2d`, plus bias, plus `residual` when given.
    /// In bf16, taps that meet the same pixel of a doubled picture may be added up and rounded first.
    ///
    /// `x`: `[h, w, in]`; result and `residual`: `[h', w', out]`.
    fn conv2d(
        &self,
        x: &Self::Tensor,
        conv: &Self::Conv,
        geometry: ConvGeometry,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor>;
}

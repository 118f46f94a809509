//! The [`Backend`] trait: the operations of FLUX.2, each defined by its formula, shapes and dtypes.
//!
//! Parameters are always f32: norm weights, modulations and cosines are small. Latents stay f32 between steps, too.
//! Attention reads queries, keys and values as lists of row blocks, so that text, image and cached reference keys are never
//! copied together.

use std::ops::Range;

use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape};

use crate::{Activation, AttentionSpec, ConvGeometry, Error, HeadBlock, Result, RopeTable, RowGroups};

/// A tensor of a backend.
pub trait Tensor: Clone + Send + Sync {
    /// The dimensions.
    fn shape(&self) -> &Shape;
    /// The element type: f32 or bf16.
    fn dtype(&self) -> DType;
}

/// A result that a backend may still be computing; calling it waits. It may be called on any thread.
pub type Pending<T> = Box<dyn FnOnce() -> Result<T> + Send>;

/// Where a weight is kept between its uses ([`Backend::load_weight`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// On the device.
    Device,
    /// In host memory, streamed to the device whenever it is used.
    Host,
}

/// What happens to the operations of a [`Backend::replay`] call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunMode {
    /// They are executed, and the result is used.
    Execute,
    /// They are only recorded as a graph, for later replays.
    Record,
}

operations! {$
    /// Writes the operations of [`Backend`] in an `impl Backend` block.
    ///
    /// The body of every method is `forward!(self, operation(arguments))`, where `forward` is a macro of the caller: its last
    /// arm treats any operation, arms before it treat single ones. So an operation that is added to [`Backend`] needs nothing
    /// in backends that treat all alike.
    ///
    /// - `backend_methods!(required, forward)`: the operations without a default.
    /// - `backend_methods!(provided, forward)`: those with one. A backend that leaves them out gets the defaults, which call its
    ///   own required operations.
    /// - `backend_methods!(names)`: an array of all names.
    ///
    /// The signatures name types without their paths; [`signatures`](crate::signatures) holds them all.
    ///
    /// ```
    /// use kiln_ops::{Backend, Reference, backend_methods, signatures::*};
    ///
    /// /// Computes `x - y` instead of `x + y`.
    /// #[derive(Clone)]
    /// struct Subtracting {
    ///     inner: Reference,
    /// }
    ///
    /// macro_rules! forward {
    ///     ($self:ident, add($x:ident, $y:ident)) => { $self.inner.add_scaled($x, $y, -1.0) };
    ///     ($self:ident, $operation:ident $arguments:tt) => { $self.inner.$operation $arguments };
    /// }
    ///
    /// impl Backend for Subtracting {
    ///     type Tensor = HostTensor;
    ///     type Weight = <Reference as Backend>::Weight;
    ///     type Conv = <Reference as Backend>::Conv;
    ///     type GraphCache = ();
    ///
    ///     fn name(&self) -> String {
    ///         "subtracting".into()
    ///     }
    ///
    ///     backend_methods!(required, forward);
    /// }
    ///
    /// let x = HostTensor::from_f32([2], vec![3.0, 4.0])?;
    /// let y = Subtracting { inner: Reference::new() }.add(&x, &x)?;
    /// assert_eq!(y.to_f32()?.as_ref(), [0.0, 0.0]);
    /// # Ok::<(), kiln_ops::Error>(())
    /// ```
    macro backend_methods;

    /// The operations of FLUX.2.
    ///
    /// Tensors are row-major and immutable; an operation returns a new one. Only [`Backend::write_rows`] changes a tensor,
    /// and only its owner sees that. **Activations** are f32 or bf16; all activations
    /// of one call have the same dtype, and so has the result. **Parameters** (norm weights, modulations, cosines, biases) are
    /// f32 tensors. Sums are accumulated in f32 or better, whatever the dtypes. Arguments that don't fit are
    /// [`Error::Arguments`](crate::Error::Arguments), never a panic.
    ///
    /// A backend is a handle: clones share the device, its memory and its threads.
    pub trait Backend: Clone + Send + Sync;

    own {
        /// A tensor on this backend.
        type Tensor: Tensor;

        /// A linear layer in this backend's form: dense or quantized weight, bias and LoRA deltas. Clones share its memory.
        type Weight: Clone + Send + Sync;

        /// A convolution's kernel and bias in this backend's form.
        type Conv: Send + Sync;

        /// Recorded graphs of [`Backend::replay`]; `()` for backends that record nothing.
        type GraphCache: Default + Send + Sync;

        /// Name for messages, such as `cpu (avx512)`.
        fn name(&self) -> String;

        /// Everything that the last bits of results depend on: within one build, backends with equal strings give equal
        /// results.
        fn numerics(&self) -> String {
            self.name()
        }

        /// Whether weights are used directly from host memory, so that prefetching a mapped file helps.
        fn reads_host_weights(&self) -> bool {
            false
        }

        /// The largest batch, in rows, for which batching images pays off, as measured; 0 if it never does.
        fn max_batch_rows(&self) -> usize {
            0
        }

        /// Runs `work` on `inputs`. A backend may record its operations as a graph and replay that on later calls, where
        /// launching single operations takes longer than executing them; the results are bit-identical.
        ///
        /// For one `key` and inputs of equal shapes and dtypes, `work` must call the same operations every time, only on the
        /// backend and inputs passed to it, and return a tensor that it created. Other tensors and weights that it reads are
        /// kept by the graph and read again at every replay. It must not upload or download. It may be called twice, since
        /// operations that were [recorded](RunMode::Record) have not been executed.
        fn replay<E: From<Error>>(
            &self,
            graphs: &Self::GraphCache,
            key: &[usize],
            inputs: &[&Self::Tensor],
            mut work: impl FnMut(&Self, RunMode, &[&Self::Tensor]) -> Result<Self::Tensor, E>,
        ) -> Result<Self::Tensor, E> {
            let _ = (graphs, key);
            work(self, RunMode::Execute, inputs)
        }
    }

    required {
        /// Copies a float tensor from the host and converts it to `dtype` (f32 or bf16).
        fn upload(&self, host: &HostTensor, dtype: DType) -> Result<Self::Tensor>;

        /// Copies a tensor to the host, keeping its dtype; waits until it is computed.
        fn download(&self, x: &Self::Tensor) -> Result<HostTensor>;

        /// `round(clamp(scale · x + shift, 0, 1) · 255)`, copied to the host: the bytes of an image. Computed in f32, ties to
        /// even; NaN becomes 0. Waits like [`Backend::download`].
        fn download_bytes(&self, x: &Self::Tensor, scale: f32, shift: f32) -> Result<Vec<u8>>;

        /// Loads a linear layer. The host bytes may be a mapped file and are kept instead of copied where possible.
        ///
        /// Dense and packed weights are used with their (dequantized) values. An int8 weight means an int8 matmul: with `m`
        /// the largest magnitude in a row of `x` (of the concatenated row, if `x` is a list), `q = round(x · (127 / m))` in
        /// f32, ties to even, and `x · Wᵀ = Σ q · w · (m / 127) · scale`, with an exact sum. [`int8`](crate::int8) defines
        /// the rounding, rows of zeros, NaN and infinity, and the largest width. If the weight is
        /// [rotated](kiln_tensor::Rotation), so is the (concatenated) row of `x` before all that, in f32.
        ///
        /// An [fp8 matmul](HostLinear::with_fp8_matmul) quantizes the rows of `x` and of the weight: with `m` the largest
        /// magnitude of a row, `q = e4m3(x · (448 / m))`, and `x · Wᵀ = Σ q · w · (m / 448) · (n / 448)` with `n` that of the
        /// weight's row. The sum may have as few as 14 bits. [`fp8`](crate::fp8) defines the rounding. Packed matrices that
        /// [are e4m3 already](kiln_tensor::packed::PackedTensor::is_fp8) keep their values and scales.
        ///
        /// An [nvfp4 matmul](HostLinear::with_nvfp4_matmul) quantizes the rows of `x` to what the weight is: with `m` the largest
        /// magnitude of a row and `b` that of a block of 16 columns, `s = e4m3(b · (2688 / m) / 6)`,
        /// `q = e2m1(x · (2688 / m / s))`, and `x · Wᵀ = Σ q · s · w · (m / 2688) · g`, with `w` the weight's values times their
        /// blocks' scales and `g` the scale of its matrix. [`nvfp4`](crate::nvfp4) defines the rounding.
        ///
        /// Bias and LoRA deltas are not quantized; deltas multiply the original `x`.
        ///
        /// `residency` does not affect results. Backends that compute on the host ignore it.
        fn load_weight(&self, linear: HostLinear, residency: Residency) -> Result<Self::Weight>;

        /// The same layer with other LoRA deltas; the weight is shared, not copied.
        fn with_deltas(&self, w: &Self::Weight, deltas: Vec<LoraDelta>) -> Result<Self::Weight>;

        /// Loads a convolution: `kernel` `[out, in, height, width]`, `bias` `[out]`.
        fn load_conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<Self::Conv>;

        /// The same values with another shape of as many elements.
        fn reshape(&self, x: &Self::Tensor, shape: Shape) -> Result<Self::Tensor>;

        /// The same values as f32 or bf16 (rounded to nearest even).
        fn cast(&self, x: &Self::Tensor, dtype: DType) -> Result<Self::Tensor>;

        /// Rows `range` of the first axis.
        fn slice_rows(&self, x: &Self::Tensor, range: Range<usize>) -> Result<Self::Tensor>;

        /// Concatenates `[rows_i, dim]` tensors to `[Σ rows_i, dim]`.
        fn concat_rows(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

        /// Replaces rows `first..first + n` of `x` by `rows` `[n, dim]`: in place if nothing else shares the memory of `x`,
        /// otherwise in a copy. Clones and slices of `x` keep their values. `x`: `[rows, dim]`.
        fn write_rows(&self, x: &mut Self::Tensor, first: usize, rows: &Self::Tensor) -> Result<()>;

        /// Concatenates `[rows, dim_i]` tensors to `[rows, Σ dim_i]`.
        fn concat_columns(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

        /// `x · Wᵀ + bias`. `x`: `[rows, in]`; `w`: `[out, in]`; result `[rows, out]`.
        fn linear(&self, x: &Self::Tensor, w: &Self::Weight) -> Result<Self::Tensor>;

        /// [`Backend::linear`] with its output columns split into tensors of these widths, which add up to `out`.
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
            gate: Option<(&Self::Tensor, &RowGroups)>,
            residual: &Self::Tensor,
        ) -> Result<Self::Tensor>;

        /// `layer_norm(x) * (1 + scale[group of row]) + shift[group of row]`, the norm without weights:
        /// `(x - mean) / sqrt(variance + eps)` over the last axis, biased variance.
        ///
        /// `x`: `[rows, dim]`; `scale`, `shift`: `[groups, dim]`.
        fn ada_layer_norm(
            &self,
            x: &Self::Tensor,
            scale: &Self::Tensor,
            shift: &Self::Tensor,
            groups: &RowGroups,
            eps: f32,
        ) -> Result<Self::Tensor>;

        /// `x / sqrt(mean(x²) + eps) * weight` over the last axis. `x`: `[rows, dim]`; `weight`: `[dim]`.
        fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Tensor, eps: f32) -> Result<Self::Tensor>;

        /// [`Backend::rms_norm`] of every head, then the rotary embedding: a pair `(a, b)` with angle `θ` becomes
        /// `(a·cos θ - b·sin θ, a·sin θ + b·cos θ)`. Without a weight, heads are rotated only, and `eps` is not used.
        ///
        /// `x`: `[tokens, heads · head_dim]`; `weight`: `[head_dim]`; the table has a row of `head_dim / 2` angles per token.
        fn norm_rope(
            &self,
            x: &Self::Tensor,
            weight: Option<&Self::Tensor>,
            rope: &RopeTable<Self::Tensor>,
            eps: f32,
        ) -> Result<Self::Tensor>;

        /// `softmax(q·kᵀ / sqrt(head_dim)) · v` per head, over the keys that the mask allows.
        ///
        /// Each of `q`, `k`, `v` is a list of row blocks, treated as concatenated: `q` `[queries, heads · head_dim]`, `k` and `v`
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

        /// Applies `f` to every element.
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

        /// `Σ|x - y| / Σ|y|` over all elements, 0 if the tensors are equal: how much `x` differs from `y`. Equal shapes; the
        /// result is f32 `[1, 1]`. NaN in either, or infinity at the same place of both, gives NaN: so `relative_l1(x, x)` tells
        /// whether all of `x` is finite.
        fn relative_l1(&self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor>;

        /// `x * scale + shift` with one scale and shift per column. `x`: `[…, dim]`; `scale`, `shift`: `[dim]`.
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
        /// In bf16, kernel weights that meet the same pixel of an upsampled input may be summed and rounded first.
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

    provided {
        /// Waits until all operations called so far are complete. Synchronous backends return at once.
        fn synchronize(&self) -> Result<()> {
            Ok(())
        }

        /// [`Backend::download`] without waiting: the copy happens after all earlier operations and is not delayed by later
        /// ones.
        fn download_async(&self, x: &Self::Tensor) -> Result<Pending<HostTensor>> {
            let host = self.download(x)?;
            Ok(Box::new(move || Ok(host)))
        }

        /// [`Backend::download_bytes`] without waiting.
        fn download_bytes_async(&self, x: &Self::Tensor, scale: f32, shift: f32) -> Result<Pending<Vec<u8>>> {
            let bytes = self.download_bytes(x, scale, shift)?;
            Ok(Box::new(move || Ok(bytes)))
        }

        /// Returns a [`Pending`] that waits for all operations called before this one, and for none after it.
        fn fence(&self) -> Result<Pending<()>> {
            Ok(Box::new(|| Ok(())))
        }

        /// [`Backend::swiglu`] of [`Backend::linear`].
        fn linear_swiglu(&self, x: &Self::Tensor, w: &Self::Weight) -> Result<Self::Tensor> {
            self.swiglu(&self.linear(x, w)?)
        }

        /// [`Backend::linear_split`] of [`Backend::ada_layer_norm`] with `modulation = [scale, shift]`, bit-identical to the two calls.
        fn ada_linear_split<const N: usize>(
            &self,
            x: &Self::Tensor,
            modulation: [&Self::Tensor; 2],
            groups: &RowGroups,
            eps: f32,
            w: &Self::Weight,
            widths: [usize; N],
        ) -> Result<[Self::Tensor; N]> {
            let [scale, shift] = modulation;
            let x = self.ada_layer_norm(x, scale, shift, groups, eps)?;
            self.linear_split(&x, w, widths)
        }

        /// [`Backend::ada_linear_split`] with [`Backend::swiglu`] of the last output, whose width counts both halves.
        fn ada_linear_swiglu<const N: usize>(
            &self,
            x: &Self::Tensor,
            modulation: [&Self::Tensor; 2],
            groups: &RowGroups,
            eps: f32,
            w: &Self::Weight,
            widths: [usize; N],
        ) -> Result<[Self::Tensor; N]> {
            let mut outputs = self.ada_linear_split(x, modulation, groups, eps, w, widths)?;
            if let Some(last) = outputs.last_mut() {
                *last = self.swiglu(last)?;
            }
            Ok(outputs)
        }

        /// [`Backend::norm_rope`] of the queries and of the keys of the same tokens.
        fn qk_norm_rope(
            &self,
            qk: [&Self::Tensor; 2],
            weights: Option<[&Self::Tensor; 2]>,
            rope: &RopeTable<Self::Tensor>,
            eps: f32,
        ) -> Result<[Self::Tensor; 2]> {
            let [q, k] = qk;
            let [q_weight, k_weight] = [0, 1].map(|i| weights.map(|weights| weights[i]));
            Ok([self.norm_rope(q, q_weight, rope, eps)?, self.norm_rope(k, k_weight, rope, eps)?])
        }

        /// [`Backend::attention`] of queries and keys after [`Backend::qk_norm_rope`] of each of their row blocks.
        fn norm_rope_attention(
            &self,
            qk: &[HeadBlock<'_, Self::Tensor>],
            v: &[&Self::Tensor],
            eps: f32,
            spec: &AttentionSpec,
        ) -> Result<Self::Tensor> {
            let normed = qk.iter().map(|block| block.norm_rope(self, eps)).collect::<Result<Vec<_>>>()?;
            let (q, k): (Vec<_>, Vec<_>) = normed.iter().map(|[q, k]| (q, k)).unzip();
            self.attention(&q, &k, v, spec)
        }
    }
}

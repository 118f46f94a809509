//! The list of [`Backend`](crate::Backend)'s methods, from which backends that wrap another backend are generated.

/// Generates methods in an `impl Backend` block of a type that wraps another backend.
///
/// The body of every method is `forward!(self, method(arguments))`, where `forward` is a macro of the caller: its last
/// arm forwards any method to the inner backend, arms before it treat single methods. A method that is added to
/// [`Backend`](crate::Backend) is added here once, and all wrappers forward it.
///
/// - `required`: the methods without a default implementation, except `name`.
/// - `provided`: those with one, except `replay`. A wrapper that leaves them out gets the defaults, which call its own
///   required methods.
///
/// The list names types without their paths, so the caller must import them.
///
/// ```
/// use std::ops::Range;
///
/// use kiln_ops::{
///     Activation, AttentionSpec, Backend, ConvGeometry, Reference, Residency, Result, RopeTable, RowGroups,
///     backend_methods,
/// };
/// use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape};
///
/// /// Computes `x - y` instead of `x + y`.
/// #[derive(Clone)]
/// struct Subtracting {
///     inner: Reference,
/// }
///
/// macro_rules! forward {
///     ($self:ident, add($x:ident, $y:ident)) => { $self.inner.add_scaled($x, $y, -1.0) };
///     ($self:ident, $method:ident $arguments:tt) => { $self.inner.$method $arguments };
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
#[macro_export]
macro_rules! backend_methods {
    (required, $forward:ident) => {
        fn upload(&self, host: &HostTensor, dtype: DType) -> Result<Self::Tensor> {
            $forward!(self, upload(host, dtype))
        }

        fn download(&self, x: &Self::Tensor) -> Result<HostTensor> {
            $forward!(self, download(x))
        }

        fn download_bytes(&self, x: &Self::Tensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
            $forward!(self, download_bytes(x, scale, shift))
        }

        fn load_weight(&self, linear: HostLinear, residency: Residency) -> Result<Self::Weight> {
            $forward!(self, load_weight(linear, residency))
        }

        fn with_deltas(&self, w: &Self::Weight, deltas: Vec<LoraDelta>) -> Result<Self::Weight> {
            $forward!(self, with_deltas(w, deltas))
        }

        fn load_conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<Self::Conv> {
            $forward!(self, load_conv(kernel, bias))
        }

        fn reshape(&self, x: &Self::Tensor, shape: Shape) -> Result<Self::Tensor> {
            $forward!(self, reshape(x, shape))
        }

        fn cast(&self, x: &Self::Tensor, dtype: DType) -> Result<Self::Tensor> {
            $forward!(self, cast(x, dtype))
        }

        fn slice_rows(&self, x: &Self::Tensor, range: Range<usize>) -> Result<Self::Tensor> {
            $forward!(self, slice_rows(x, range))
        }

        fn concat_rows(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor> {
            $forward!(self, concat_rows(parts))
        }

        fn write_rows(&self, x: &mut Self::Tensor, first: usize, rows: &Self::Tensor) -> Result<()> {
            $forward!(self, write_rows(x, first, rows))
        }

        fn concat_columns(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor> {
            $forward!(self, concat_columns(parts))
        }

        fn linear(&self, x: &Self::Tensor, w: &Self::Weight) -> Result<Self::Tensor> {
            $forward!(self, linear(x, w))
        }

        fn linear_split<const N: usize>(
            &self,
            x: &Self::Tensor,
            w: &Self::Weight,
            widths: [usize; N],
        ) -> Result<[Self::Tensor; N]> {
            $forward!(self, linear_split(x, w, widths))
        }

        fn linear_gated_add(
            &self,
            xs: &[&Self::Tensor],
            w: &Self::Weight,
            gate: Option<(&Self::Tensor, &RowGroups)>,
            residual: &Self::Tensor,
        ) -> Result<Self::Tensor> {
            $forward!(self, linear_gated_add(xs, w, gate, residual))
        }

        fn ada_layer_norm(
            &self,
            x: &Self::Tensor,
            scale: &Self::Tensor,
            shift: &Self::Tensor,
            groups: &RowGroups,
            eps: f32,
        ) -> Result<Self::Tensor> {
            $forward!(self, ada_layer_norm(x, scale, shift, groups, eps))
        }

        fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Tensor, eps: f32) -> Result<Self::Tensor> {
            $forward!(self, rms_norm(x, weight, eps))
        }

        fn norm_rope(
            &self,
            x: &Self::Tensor,
            weight: Option<&Self::Tensor>,
            rope: &RopeTable<Self::Tensor>,
            eps: f32,
        ) -> Result<Self::Tensor> {
            $forward!(self, norm_rope(x, weight, rope, eps))
        }

        fn attention(
            &self,
            q: &[&Self::Tensor],
            k: &[&Self::Tensor],
            v: &[&Self::Tensor],
            spec: &AttentionSpec,
        ) -> Result<Self::Tensor> {
            $forward!(self, attention(q, k, v, spec))
        }

        fn swiglu(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
            $forward!(self, swiglu(x))
        }

        fn activation(&self, x: &Self::Tensor, f: Activation) -> Result<Self::Tensor> {
            $forward!(self, activation(x, f))
        }

        fn add(&self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor> {
            $forward!(self, add(x, y))
        }

        fn add_scaled(&self, x: &Self::Tensor, y: &Self::Tensor, s: f32) -> Result<Self::Tensor> {
            $forward!(self, add_scaled(x, y, s))
        }

        fn lerp(&self, x: &Self::Tensor, y: &Self::Tensor, t: f32) -> Result<Self::Tensor> {
            $forward!(self, lerp(x, y, t))
        }

        fn guide(&self, c: &Self::Tensor, u: &Self::Tensor, g: f32) -> Result<Self::Tensor> {
            $forward!(self, guide(c, u, g))
        }

        fn blend_rows(
            &self,
            x: &Self::Tensor,
            y: &Self::Tensor,
            mask: &Self::Tensor,
        ) -> Result<Self::Tensor> {
            $forward!(self, blend_rows(x, y, mask))
        }

        fn relative_l1(&self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor> {
            $forward!(self, relative_l1(x, y))
        }

        fn affine(
            &self,
            x: &Self::Tensor,
            scale: &Self::Tensor,
            shift: &Self::Tensor,
        ) -> Result<Self::Tensor> {
            $forward!(self, affine(x, scale, shift))
        }

        fn space_to_depth(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
            $forward!(self, space_to_depth(x))
        }

        fn depth_to_space(&self, x: &Self::Tensor) -> Result<Self::Tensor> {
            $forward!(self, depth_to_space(x))
        }

        fn group_norm(
            &self,
            x: &Self::Tensor,
            groups: usize,
            weight: &Self::Tensor,
            bias: &Self::Tensor,
            eps: f32,
            f: Option<Activation>,
        ) -> Result<Self::Tensor> {
            $forward!(self, group_norm(x, groups, weight, bias, eps, f))
        }

        fn conv2d(
            &self,
            x: &Self::Tensor,
            conv: &Self::Conv,
            geometry: ConvGeometry,
            residual: Option<&Self::Tensor>,
        ) -> Result<Self::Tensor> {
            $forward!(self, conv2d(x, conv, geometry, residual))
        }
    };

    (provided, $forward:ident) => {
        fn numerics(&self) -> String {
            $forward!(self, numerics())
        }

        fn reads_host_weights(&self) -> bool {
            $forward!(self, reads_host_weights())
        }

        fn max_batch_rows(&self) -> usize {
            $forward!(self, max_batch_rows())
        }

        fn synchronize(&self) -> Result<()> {
            $forward!(self, synchronize())
        }

        fn fence(&self) -> Result<Pending<()>> {
            $forward!(self, fence())
        }

        fn download_async(&self, x: &Self::Tensor) -> Result<Pending<HostTensor>> {
            $forward!(self, download_async(x))
        }

        fn download_bytes_async(&self, x: &Self::Tensor, scale: f32, shift: f32) -> Result<Pending<Vec<u8>>> {
            $forward!(self, download_bytes_async(x, scale, shift))
        }

        fn swiglu_gated_add(
            &self,
            attn: Option<&Self::Tensor>,
            gate_up: &Self::Tensor,
            w: &Self::Weight,
            gate: Option<(&Self::Tensor, &RowGroups)>,
            residual: &Self::Tensor,
        ) -> Result<Self::Tensor> {
            $forward!(self, swiglu_gated_add(attn, gate_up, w, gate, residual))
        }

        fn ada_linear_split<const N: usize>(
            &self,
            x: &Self::Tensor,
            modulation: [&Self::Tensor; 2],
            groups: &RowGroups,
            eps: f32,
            w: &Self::Weight,
            widths: [usize; N],
        ) -> Result<[Self::Tensor; N]> {
            $forward!(self, ada_linear_split(x, modulation, groups, eps, w, widths))
        }

        fn qk_norm_rope(
            &self,
            qk: [&Self::Tensor; 2],
            weights: Option<[&Self::Tensor; 2]>,
            rope: &RopeTable<Self::Tensor>,
            eps: f32,
        ) -> Result<[Self::Tensor; 2]> {
            $forward!(self, qk_norm_rope(qk, weights, rope, eps))
        }
    };
}

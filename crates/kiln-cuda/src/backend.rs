//! The CUDA backend: [`Backend`] implemented by the launchers in `ops`.
//!
//! Batching images gains nothing on an H200 (klein 4B, 1024×1024: 114 ms for a step of two images, 57 ms for one), so
//! `max_batch_rows` keeps its default, 0.

use std::ops::Range;
use std::sync::atomic::Ordering;

use kiln_ops::{
    Activation, AttentionSpec, Backend, ConvGeometry, Pending, Residency, Result, RopeTable, RowGroups,
    RunMode, shapes,
};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape};

use crate::context::Context;
use crate::error::{self, Error};
use crate::ops::{attention, conv, elementwise, group_norm, linear, movement, norm, reduce, rope};
use crate::options::Options;
use crate::probe::Gpu;
use crate::replay::{self, CudaGraphCache};
use crate::tensor::CudaTensor;
use crate::weight::{CudaConv, CudaWeight};

/// The operations on one NVIDIA GPU. Clones share the GPU's stream and memory.
#[derive(Clone)]
pub struct CudaBackend {
    pub(crate) cx: Context,
}

impl CudaBackend {
    /// Loads the libraries and opens the GPU. Returns an error, never panics, if something is missing.
    pub fn new(options: &Options) -> error::Result<CudaBackend> {
        Ok(CudaBackend { cx: Context::new(options)? })
    }

    /// The GPU in use.
    pub fn gpu(&self) -> &Gpu {
        self.cx.gpu()
    }

    /// Why cuBLASLt is not used; `None` if it is.
    pub fn cublaslt_error(&self) -> Option<&Error> {
        self.cx.shared().cublaslt.as_ref().err()
    }

    /// Bytes of GPU memory that this backend can still allocate.
    pub fn memory_free(&self) -> Result<usize> {
        self.cx.check(self.cx.device_memory().available())
    }

    /// Bytes of GPU memory that this backend holds.
    pub fn memory_held(&self) -> usize {
        self.cx.device_memory().held()
    }

    /// Maximum of [`CudaBackend::memory_held`] since the last [`CudaBackend::release_memory`].
    pub fn memory_peak(&self) -> usize {
        self.cx.device_memory().peak()
    }

    /// Returns unused memory to the driver and restarts the peak count.
    pub fn release_memory(&self) {
        if let Ok(device) = self.cx.device("cuMemFree") {
            device.memory.release();
        }
    }

    /// Number of CUDA graph replays so far.
    pub fn graph_replays(&self) -> usize {
        self.cx.shared().graph_replays.load(Ordering::Relaxed)
    }

    /// Waits for all work submitted so far.
    pub fn wait(&self) -> Result<()> {
        self.cx.check(self.cx.wait())
    }

    /// Runs `work` and returns its time on the GPU, in milliseconds.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        let mut failed = None;
        let time = self.cx.time(|| {
            failed = work().err();
            Ok(())
        });
        match failed {
            Some(e) => Err(e),
            None => self.cx.check(time),
        }
    }
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

impl Backend for CudaBackend {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Conv = CudaConv;
    type GraphCache = CudaGraphCache;

    fn name(&self) -> String {
        self.cx.name()
    }

    fn numerics(&self) -> String {
        self.cx.numerics()
    }

    fn synchronize(&self) -> Result<()> {
        self.wait()
    }

    fn replay<E: From<kiln_ops::Error>>(
        &self,
        replays: &CudaGraphCache,
        key: &[usize],
        inputs: &[&CudaTensor],
        mut work: impl FnMut(&Self, RunMode, &[&CudaTensor]) -> Result<CudaTensor, E>,
    ) -> Result<CudaTensor, E> {
        replay::replay(&self.cx, replays, key, inputs, |cx, run, inputs| {
            work(&CudaBackend { cx: cx.clone() }, run, inputs)
        })
    }

    fn upload(&self, host: &HostTensor, dtype: DType) -> Result<CudaTensor> {
        shapes::upload(host, dtype)?;
        CudaTensor::from_host(&self.cx, host, dtype)
    }

    fn download(&self, x: &CudaTensor) -> Result<HostTensor> {
        x.to_host(&self.cx)
    }

    fn download_bytes(&self, x: &CudaTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
        movement::download_bytes(&self.cx, x, scale, shift)
    }

    fn download_async(&self, x: &CudaTensor) -> Result<Pending<HostTensor>> {
        x.to_host_async(&self.cx)
    }

    fn download_bytes_async(&self, x: &CudaTensor, scale: f32, shift: f32) -> Result<Pending<Vec<u8>>> {
        movement::download_bytes_async(&self.cx, x, scale, shift)
    }

    fn fence(&self) -> Result<Pending<()>> {
        let (cx, mark) = (self.cx.clone(), self.cx.check(self.cx.mark())?);
        Ok(Box::new(move || cx.check(mark.wait().map(drop))))
    }

    fn load_weight(&self, linear: HostLinear, residency: Residency) -> Result<CudaWeight> {
        CudaWeight::new(&self.cx, linear, residency)
    }

    fn with_deltas(&self, w: &CudaWeight, deltas: Vec<LoraDelta>) -> Result<CudaWeight> {
        w.with_deltas(&self.cx, &deltas)
    }

    fn load_conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<CudaConv> {
        CudaConv::new(&self.cx, kernel, bias)
    }

    fn reshape(&self, x: &CudaTensor, shape: Shape) -> Result<CudaTensor> {
        movement::reshape(x, &shape)
    }

    fn cast(&self, x: &CudaTensor, dtype: DType) -> Result<CudaTensor> {
        movement::cast(&self.cx, x, dtype)
    }

    fn slice_rows(&self, x: &CudaTensor, range: Range<usize>) -> Result<CudaTensor> {
        movement::slice_rows(x, range)
    }

    fn concat_rows(&self, parts: &[&CudaTensor]) -> Result<CudaTensor> {
        movement::concat_rows(&self.cx, parts)
    }

    fn write_rows(&self, x: &mut CudaTensor, first: usize, rows: &CudaTensor) -> Result<()> {
        movement::write_rows(&self.cx, x, first, rows)
    }

    fn concat_columns(&self, parts: &[&CudaTensor]) -> Result<CudaTensor> {
        movement::concat_columns(&self.cx, parts)
    }

    fn linear(&self, x: &CudaTensor, w: &CudaWeight) -> Result<CudaTensor> {
        linear::linear(&self.cx, x, w)
    }

    fn linear_split<const N: usize>(
        &self,
        x: &CudaTensor,
        w: &CudaWeight,
        widths: [usize; N],
    ) -> Result<[CudaTensor; N]> {
        linear::linear_split(&self.cx, x, w, widths)
    }

    fn linear_gated_add(
        &self,
        xs: &[&CudaTensor],
        w: &CudaWeight,
        gate: Option<(&CudaTensor, &RowGroups)>,
        residual: &CudaTensor,
    ) -> Result<CudaTensor> {
        linear::linear_gated_add(&self.cx, xs, w, gate, residual)
    }

    fn swiglu_gated_add(
        &self,
        left: Option<&CudaTensor>,
        gate_up: &CudaTensor,
        w: &CudaWeight,
        gate: Option<(&CudaTensor, &RowGroups)>,
        residual: &CudaTensor,
    ) -> Result<CudaTensor> {
        linear::swiglu_gated_add(&self.cx, left, gate_up, w, gate, residual)
    }

    fn ada_layer_norm(
        &self,
        x: &CudaTensor,
        scale: &CudaTensor,
        shift: &CudaTensor,
        groups: &RowGroups,
        eps: f32,
    ) -> Result<CudaTensor> {
        norm::ada_layer_norm(&self.cx, x, [scale, shift], groups, eps)
    }

    fn ada_linear_split<const N: usize>(
        &self,
        x: &CudaTensor,
        modulation: [&CudaTensor; 2],
        groups: &RowGroups,
        eps: f32,
        w: &CudaWeight,
        widths: [usize; N],
    ) -> Result<[CudaTensor; N]> {
        linear::ada_linear_split(&self.cx, x, modulation, groups, eps, w, widths)
    }

    fn rms_norm(&self, x: &CudaTensor, weight: &CudaTensor, eps: f32) -> Result<CudaTensor> {
        norm::rms_norm(&self.cx, x, weight, eps)
    }

    fn norm_rope(
        &self,
        x: &CudaTensor,
        weight: Option<&CudaTensor>,
        rope: &RopeTable<Self::Tensor>,
        eps: f32,
    ) -> Result<CudaTensor> {
        rope::norm_rope(&self.cx, x, weight, rope, eps)
    }

    fn qk_norm_rope(
        &self,
        qk: [&CudaTensor; 2],
        weights: Option<[&CudaTensor; 2]>,
        rope: &RopeTable<Self::Tensor>,
        eps: f32,
    ) -> Result<[CudaTensor; 2]> {
        rope::qk_norm_rope(&self.cx, qk, weights, rope, eps)
    }

    fn attention(
        &self,
        q: &[&CudaTensor],
        k: &[&CudaTensor],
        v: &[&CudaTensor],
        spec: &AttentionSpec,
    ) -> Result<CudaTensor> {
        attention::attention(&self.cx, q, k, v, spec)
    }

    fn swiglu(&self, x: &CudaTensor) -> Result<CudaTensor> {
        elementwise::swiglu(&self.cx, x)
    }

    fn activation(&self, x: &CudaTensor, f: Activation) -> Result<CudaTensor> {
        elementwise::activation(&self.cx, x, f)
    }

    fn add(&self, x: &CudaTensor, y: &CudaTensor) -> Result<CudaTensor> {
        elementwise::add(&self.cx, x, y)
    }

    fn relative_l1(&self, x: &CudaTensor, y: &CudaTensor) -> Result<CudaTensor> {
        reduce::relative_l1(&self.cx, x, y)
    }

    fn add_scaled(&self, x: &CudaTensor, y: &CudaTensor, s: f32) -> Result<CudaTensor> {
        elementwise::add_scaled(&self.cx, x, y, s)
    }

    fn lerp(&self, x: &CudaTensor, y: &CudaTensor, t: f32) -> Result<CudaTensor> {
        elementwise::lerp(&self.cx, x, y, t)
    }

    fn guide(&self, c: &CudaTensor, u: &CudaTensor, g: f32) -> Result<CudaTensor> {
        elementwise::guide(&self.cx, c, u, g)
    }

    fn blend_rows(&self, x: &CudaTensor, y: &CudaTensor, mask: &CudaTensor) -> Result<CudaTensor> {
        elementwise::blend_rows(&self.cx, x, y, mask)
    }

    fn affine(&self, x: &CudaTensor, scale: &CudaTensor, shift: &CudaTensor) -> Result<CudaTensor> {
        elementwise::affine(&self.cx, x, scale, shift)
    }

    fn space_to_depth(&self, x: &CudaTensor) -> Result<CudaTensor> {
        movement::space_to_depth(&self.cx, x)
    }

    fn depth_to_space(&self, x: &CudaTensor) -> Result<CudaTensor> {
        movement::depth_to_space(&self.cx, x)
    }

    fn group_norm(
        &self,
        x: &CudaTensor,
        groups: usize,
        weight: &CudaTensor,
        bias: &CudaTensor,
        eps: f32,
        f: Option<Activation>,
    ) -> Result<CudaTensor> {
        group_norm::group_norm(&self.cx, x, groups, [weight, bias], eps, f)
    }

    fn conv2d(
        &self,
        x: &CudaTensor,
        conv: &CudaConv,
        geometry: ConvGeometry,
        residual: Option<&CudaTensor>,
    ) -> Result<CudaTensor> {
        conv::conv2d(&self.cx, x, conv, geometry, residual)
    }
}

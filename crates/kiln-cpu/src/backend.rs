//! The [`Backend`] implementation: each operation is a call into [`ops`](crate::ops).

use std::ops::Range;
use std::sync::Arc;

use kiln_ops::{
    Activation, AttentionSpec, Backend, ConvGeometry, Error, Residency, Result, RopeTable, RowGroups, shapes,
};
use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape};

use crate::isa::{Isa, Level};
use crate::ops::{attention, conv, elementwise, group_norm, linear, movement, norm, reduce};
use crate::parallel::Pool;
use crate::{Context, CpuConv, CpuTensor, CpuWeight};

/// See [`Backend::max_batch_rows`]. Measured on two cores with AMX: an int8 model of 384 channels gains from batching up to
/// about this many rows; a large model has more rows than that in a single image and gains nothing.
///
/// Ember in int8, milliseconds per step and image, for 1, 2, 4 and 8 images: 26.5, 16.6, 14.3, 14.9 at 256×256 (320
/// rows each); 39, 33, 36 at 384×384 (640 rows); 63, 75, 72 at 512×512 (1088 rows). Not yet
/// remeasured with the current, faster kernels. A server gains less: text encoding, decoding and PNG are not batched.
const BATCH_ROWS: usize = 1280;

/// The settings of a [`CpuBackend`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// The instruction set; `None` is the fastest this machine has.
    pub isa: Option<Isa>,
    /// The number of threads; `None` or 0 is as many as the machine runs in parallel.
    pub threads: Option<usize>,
}

/// The operations on the CPU, with a thread pool of its own. Clones share the pool.
#[derive(Clone)]
pub struct CpuBackend {
    cx: Context,
}

impl CpuBackend {
    /// Starts the threads; fails if the machine lacks the requested instruction set.
    pub fn new(options: CpuOptions) -> Result<CpuBackend> {
        let isa = options.isa.unwrap_or_else(Isa::best);
        let level = Level::detect(isa).ok_or_else(|| Error::Device {
            backend: "cpu".into(),
            what: format!("this machine has no {isa}; the best it has is {}", Isa::best()),
        })?;
        let pool = Arc::new(Pool::new(options.threads)?);
        Ok(CpuBackend { cx: Context { level, pool, buffers: Arc::default() } })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.cx
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.cx.level.isa()
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.cx.pool.threads()
    }

    /// Whether int8 weights are repacked when they are loaded, so that they take memory in addition to their mapped file.
    pub fn repacks_int8(&self) -> bool {
        match self.cx.level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx(amx) => amx.has_int8(),
            _ => false,
        }
    }
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = CpuWeight;
    type Conv = CpuConv;
    type GraphCache = ();

    fn name(&self) -> String {
        let threads = self.threads();
        format!("cpu ({}, {threads} thread{})", self.isa(), if threads == 1 { "" } else { "s" })
    }

    fn numerics(&self) -> String {
        format!("cpu ({})", self.isa())
    }

    fn reads_host_weights(&self) -> bool {
        true
    }

    fn max_batch_rows(&self) -> usize {
        BATCH_ROWS
    }

    fn upload(&self, host: &HostTensor, dtype: DType) -> Result<CpuTensor> {
        shapes::upload(host, dtype)?;
        CpuTensor::from_host(&self.cx, host, dtype)
    }

    fn download(&self, x: &CpuTensor) -> Result<HostTensor> {
        x.to_host()
    }

    fn download_bytes(&self, x: &CpuTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
        Ok(movement::to_u8(&self.cx, x, scale, shift))
    }

    fn load_weight(&self, linear: HostLinear, _: Residency) -> Result<CpuWeight> {
        CpuWeight::new(&self.cx, linear)
    }

    fn with_deltas(&self, w: &CpuWeight, deltas: Vec<LoraDelta>) -> Result<CpuWeight> {
        w.with_deltas(&deltas)
    }

    fn load_conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<CpuConv> {
        CpuConv::new(kernel, bias)
    }

    fn reshape(&self, x: &CpuTensor, shape: Shape) -> Result<CpuTensor> {
        movement::reshape(x, &shape)
    }

    fn cast(&self, x: &CpuTensor, dtype: DType) -> Result<CpuTensor> {
        movement::cast(&self.cx, x, dtype)
    }

    fn slice_rows(&self, x: &CpuTensor, range: Range<usize>) -> Result<CpuTensor> {
        movement::slice_rows(x, range)
    }

    fn concat_rows(&self, parts: &[&CpuTensor]) -> Result<CpuTensor> {
        movement::concat_rows(&self.cx, parts)
    }

    fn write_rows(&self, x: &mut CpuTensor, first: usize, rows: &CpuTensor) -> Result<()> {
        movement::write_rows(&self.cx, x, first, rows)
    }

    fn concat_columns(&self, parts: &[&CpuTensor]) -> Result<CpuTensor> {
        movement::concat_columns(&self.cx, parts)
    }

    fn linear(&self, x: &CpuTensor, w: &CpuWeight) -> Result<CpuTensor> {
        linear::linear(&self.cx, x, w)
    }

    fn linear_split<const N: usize>(
        &self,
        x: &CpuTensor,
        w: &CpuWeight,
        widths: [usize; N],
    ) -> Result<[CpuTensor; N]> {
        linear::linear_split(&self.cx, x, w, widths)
    }

    fn linear_gated_add(
        &self,
        xs: &[&CpuTensor],
        w: &CpuWeight,
        gate: Option<(&CpuTensor, &RowGroups)>,
        residual: &CpuTensor,
    ) -> Result<CpuTensor> {
        linear::linear_gated_add(&self.cx, xs, w, gate, residual)
    }

    fn ada_layer_norm(
        &self,
        x: &CpuTensor,
        scale: &CpuTensor,
        shift: &CpuTensor,
        groups: &RowGroups,
        eps: f32,
    ) -> Result<CpuTensor> {
        norm::ada_layer_norm(&self.cx, x, [scale, shift], groups, eps)
    }

    fn rms_norm(&self, x: &CpuTensor, weight: &CpuTensor, eps: f32) -> Result<CpuTensor> {
        norm::rms_norm(&self.cx, x, weight, eps)
    }

    fn norm_rope(
        &self,
        x: &CpuTensor,
        weight: Option<&CpuTensor>,
        rope: &RopeTable<Self::Tensor>,
        eps: f32,
    ) -> Result<CpuTensor> {
        norm::norm_rope(&self.cx, x, weight, rope, eps)
    }

    fn attention(
        &self,
        q: &[&CpuTensor],
        k: &[&CpuTensor],
        v: &[&CpuTensor],
        spec: &AttentionSpec,
    ) -> Result<CpuTensor> {
        attention::attention(&self.cx, q, k, v, spec)
    }

    fn swiglu(&self, x: &CpuTensor) -> Result<CpuTensor> {
        elementwise::swiglu(&self.cx, x)
    }

    fn activation(&self, x: &CpuTensor, f: Activation) -> Result<CpuTensor> {
        elementwise::activation(&self.cx, x, f)
    }

    fn add(&self, x: &CpuTensor, y: &CpuTensor) -> Result<CpuTensor> {
        elementwise::add(&self.cx, x, y)
    }

    fn relative_l1(&self, x: &CpuTensor, y: &CpuTensor) -> Result<CpuTensor> {
        reduce::relative_l1(&self.cx, x, y)
    }

    fn add_scaled(&self, x: &CpuTensor, y: &CpuTensor, s: f32) -> Result<CpuTensor> {
        elementwise::add_scaled(&self.cx, x, y, s)
    }

    fn lerp(&self, x: &CpuTensor, y: &CpuTensor, t: f32) -> Result<CpuTensor> {
        elementwise::lerp(&self.cx, x, y, t)
    }

    fn guide(&self, c: &CpuTensor, u: &CpuTensor, g: f32) -> Result<CpuTensor> {
        elementwise::guide(&self.cx, c, u, g)
    }

    fn blend_rows(&self, x: &CpuTensor, y: &CpuTensor, mask: &CpuTensor) -> Result<CpuTensor> {
        elementwise::blend_rows(&self.cx, x, y, mask)
    }

    fn affine(&self, x: &CpuTensor, scale: &CpuTensor, shift: &CpuTensor) -> Result<CpuTensor> {
        elementwise::affine(&self.cx, x, scale, shift)
    }

    fn space_to_depth(&self, x: &CpuTensor) -> Result<CpuTensor> {
        movement::space_to_depth(&self.cx, x)
    }

    fn depth_to_space(&self, x: &CpuTensor) -> Result<CpuTensor> {
        movement::depth_to_space(&self.cx, x)
    }

    fn group_norm(
        &self,
        x: &CpuTensor,
        groups: usize,
        weight: &CpuTensor,
        bias: &CpuTensor,
        eps: f32,
        f: Option<Activation>,
    ) -> Result<CpuTensor> {
        group_norm::group_norm(&self.cx, x, groups, [weight, bias], eps, f)
    }

    fn conv2d(
        &self,
        x: &CpuTensor,
        conv: &CpuConv,
        geometry: ConvGeometry,
        residual: Option<&CpuTensor>,
    ) -> Result<CpuTensor> {
        conv::conv2d(&self.cx, x, conv, geometry, residual)
    }
}

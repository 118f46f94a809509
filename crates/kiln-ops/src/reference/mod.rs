//! The reference backend: plain loops from the formulas of [`Backend`].
//!
//! Every sum is in f64 and the result is rounded once, at the end. Never optimize this code: fast backends are tested
//! against it. It is itself tested against torch (`tests/golden`).

mod attention;
mod conv;
mod elementwise;
mod linear;
mod movement;
mod norm;
mod training;

use std::ops::Range;

use kiln_tensor::{DType, HostLinear, HostTensor, LoraDelta, Shape, bf16};

use crate::{
    Activation, AttentionSpec, Backend, ConvGeometry, Error, Residency, Result, RopeTable, RowGroups, Tensor,
    shapes,
};

/// The reference backend: plain loops in f64.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Reference {
    /// Creates the backend, which has no state.
    pub const fn new() -> Self {
        Reference
    }
}

impl Tensor for HostTensor {
    fn shape(&self) -> &Shape {
        self.shape()
    }

    fn dtype(&self) -> DType {
        self.dtype()
    }
}

const NAME: &str = "reference";

/// The elements as f64.
fn values(x: &HostTensor) -> Result<Vec<f64>> {
    Ok(x.to_f32()?.iter().map(|&v| v.into()).collect())
}

/// `values` rounded to `dtype`, f32 or bf16.
fn tensor(shape: impl Into<Shape>, dtype: DType, values: Vec<f64>) -> Result<HostTensor> {
    Ok(match dtype {
        DType::F32 => HostTensor::from_f32(shape, values.iter().map(|&v| v as f32).collect())?,
        DType::BF16 => HostTensor::from_bf16(shape, values.iter().map(|&v| bf16::from_f64(v)).collect())?,
        _ => return Err(Error::DType { op: "round", dtype, backend: NAME.into() }),
    })
}

impl Backend for Reference {
    type Tensor = HostTensor;
    type Weight = linear::Linear;
    type Conv = conv::Conv;
    type GraphCache = ();

    fn name(&self) -> String {
        NAME.into()
    }

    fn upload(&self, host: &HostTensor, dtype: DType) -> Result<HostTensor> {
        shapes::upload(host, dtype)?;
        Ok(host.to_dtype(dtype)?)
    }

    fn download(&self, x: &HostTensor) -> Result<HostTensor> {
        Ok(x.clone())
    }

    fn download_bytes(&self, x: &HostTensor, scale: f32, shift: f32) -> Result<Vec<u8>> {
        let byte = |&v: &f32| ((v * scale + shift).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
        Ok(x.to_f32()?.iter().map(byte).collect())
    }

    fn load_weight(&self, linear: HostLinear, _: Residency) -> Result<linear::Linear> {
        linear::Linear::new(linear)
    }

    fn with_deltas(&self, w: &linear::Linear, deltas: Vec<LoraDelta>) -> Result<linear::Linear> {
        w.with_deltas(&deltas)
    }

    fn load_conv(&self, kernel: &HostTensor, bias: Option<&HostTensor>) -> Result<conv::Conv> {
        conv::Conv::new(kernel, bias)
    }

    fn reshape(&self, x: &HostTensor, shape: Shape) -> Result<HostTensor> {
        Ok(x.reshape(shapes::reshape(x, &shape)?)?)
    }

    fn cast(&self, x: &HostTensor, dtype: DType) -> Result<HostTensor> {
        shapes::cast(x, dtype)?;
        Ok(x.to_dtype(dtype)?)
    }

    fn slice_rows(&self, x: &HostTensor, range: Range<usize>) -> Result<HostTensor> {
        shapes::slice_rows(x, &range)?;
        Ok(x.rows(range)?)
    }

    fn concat_rows(&self, parts: &[&HostTensor]) -> Result<HostTensor> {
        movement::concat_rows(parts)
    }

    fn write_rows(&self, x: &mut HostTensor, first: usize, rows: &HostTensor) -> Result<()> {
        *x = movement::with_rows(x, first, rows)?;
        Ok(())
    }

    fn concat_columns(&self, parts: &[&HostTensor]) -> Result<HostTensor> {
        movement::concat_columns(parts)
    }

    fn linear(&self, x: &HostTensor, w: &linear::Linear) -> Result<HostTensor> {
        linear::linear(x, w)
    }

    fn linear_split<const N: usize>(
        &self,
        x: &HostTensor,
        w: &linear::Linear,
        widths: [usize; N],
    ) -> Result<[HostTensor; N]> {
        linear::linear_split(x, w, widths)
    }

    fn linear_gated_add(
        &self,
        xs: &[&HostTensor],
        w: &linear::Linear,
        gate: Option<(&HostTensor, &RowGroups)>,
        residual: &HostTensor,
    ) -> Result<HostTensor> {
        linear::linear_gated_add(xs, w, gate, residual)
    }

    fn ada_layer_norm(
        &self,
        x: &HostTensor,
        scale: &HostTensor,
        shift: &HostTensor,
        groups: &RowGroups,
        eps: f32,
    ) -> Result<HostTensor> {
        norm::ada_layer_norm(x, scale, shift, groups, eps)
    }

    fn rms_norm(&self, x: &HostTensor, weight: &HostTensor, eps: f32) -> Result<HostTensor> {
        norm::rms_norm(x, weight, eps)
    }

    fn norm_rope(
        &self,
        x: &HostTensor,
        weight: Option<&HostTensor>,
        rope: &RopeTable<Self::Tensor>,
        eps: f32,
    ) -> Result<HostTensor> {
        norm::norm_rope(x, weight, rope, eps)
    }

    fn attention(
        &self,
        q: &[&HostTensor],
        k: &[&HostTensor],
        v: &[&HostTensor],
        spec: &AttentionSpec,
    ) -> Result<HostTensor> {
        attention::attention(q, k, v, spec)
    }

    fn swiglu(&self, x: &HostTensor) -> Result<HostTensor> {
        elementwise::swiglu(x)
    }

    fn activation(&self, x: &HostTensor, f: Activation) -> Result<HostTensor> {
        elementwise::activation(x, f)
    }

    fn add(&self, x: &HostTensor, y: &HostTensor) -> Result<HostTensor> {
        shapes::add(x, y)?;
        elementwise::zip(x, y, |x, y| x + y)
    }

    fn add_scaled(&self, x: &HostTensor, y: &HostTensor, s: f32) -> Result<HostTensor> {
        shapes::add_scaled(x, y)?;
        elementwise::zip(x, y, |x, y| x + f64::from(s) * y)
    }

    fn lerp(&self, x: &HostTensor, y: &HostTensor, t: f32) -> Result<HostTensor> {
        shapes::lerp(x, y)?;
        elementwise::zip(x, y, |x, y| f64::from(t) * y + (1.0 - f64::from(t)) * x)
    }

    fn guide(&self, c: &HostTensor, u: &HostTensor, g: f32) -> Result<HostTensor> {
        shapes::guide(c, u)?;
        elementwise::zip(c, u, |c, u| u + f64::from(g) * (c - u))
    }

    fn blend_rows(&self, x: &HostTensor, y: &HostTensor, mask: &HostTensor) -> Result<HostTensor> {
        elementwise::blend_rows(x, y, mask)
    }

    fn relative_l1(&self, x: &HostTensor, y: &HostTensor) -> Result<HostTensor> {
        elementwise::relative_l1(x, y)
    }

    fn affine(&self, x: &HostTensor, scale: &HostTensor, shift: &HostTensor) -> Result<HostTensor> {
        elementwise::affine(x, scale, shift)
    }

    fn space_to_depth(&self, x: &HostTensor) -> Result<HostTensor> {
        movement::space_to_depth(x)
    }

    fn depth_to_space(&self, x: &HostTensor) -> Result<HostTensor> {
        movement::depth_to_space(x)
    }

    fn group_norm(
        &self,
        x: &HostTensor,
        groups: usize,
        weight: &HostTensor,
        bias: &HostTensor,
        eps: f32,
        f: Option<Activation>,
    ) -> Result<HostTensor> {
        norm::group_norm(x, groups, weight, bias, eps, f)
    }

    fn conv2d(
        &self,
        x: &HostTensor,
        conv: &conv::Conv,
        geometry: ConvGeometry,
        residual: Option<&HostTensor>,
    ) -> Result<HostTensor> {
        conv::conv2d(x, conv, geometry, residual)
    }
}

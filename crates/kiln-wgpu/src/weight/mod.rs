//! Weights of linear layers and convolutions in GPU memory, in the format that they are stored in.
//!
//! A weight is a list of parts, each a buffer that one kernel can see: stacked matrices of different formats, and matrices that are
//! larger than the adapter's bindings, have several. Scales of matrices and rows are multiplied into sums, with the bias.

mod conv;
mod part;
mod rows;

use std::sync::Arc;

use kiln_ops::{Residency, Result, Tensor, shapes};
use kiln_tensor::packed::PackedTensor;
use kiln_tensor::{DType, HostLinear, HostTensor, LinearWeight, LoraDelta, Rotation};

use crate::context::Context;
use crate::ops::{Quantized, quantize_rows};
use crate::tensor::WgpuTensor;
pub use conv::WgpuConv;
pub(crate) use conv::load_conv;
pub(crate) use part::{Part, parts};
pub(crate) use rows::WeightRows;

/// A linear layer on the device. Clones share its memory.
#[derive(Clone)]
pub struct WgpuWeight {
    /// Shared by copies of the layer with other LoRA deltas.
    pub(crate) matrix: Arc<Matrix>,
    pub(crate) deltas: Arc<[Delta]>,
}

/// A weight, its scales and bias.
pub(crate) struct Matrix {
    /// `[out, in]`.
    pub size: [usize; 2],
    pub product: ProductKind,
    pub parts: Vec<Part>,
    pub columns: Columns,
}

/// How an input is prepared before it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProductKind {
    /// As it is.
    Float,
    /// Rotated, then quantized to int8.
    Int8(Rotation),
    /// Quantized to fp8 or nvfp4.
    Rounded(Quantized),
}

/// What every output column is multiplied with and added to.
#[derive(Clone)]
pub(crate) struct Columns {
    /// `[2, out]`: scales and biases.
    pub values: Option<WgpuTensor>,
    pub has_scales: bool,
    pub has_bias: bool,
}

/// A low-rank update of some output columns.
pub(crate) struct Delta {
    pub rank: usize,
    pub down: Vec<Part>,
    /// Its rows are counted as output columns of the layer.
    pub up: Vec<Part>,
    pub scale: f32,
}

impl WgpuWeight {
    /// `[out, in]`.
    pub(crate) fn size(&self) -> [usize; 2] {
        self.matrix.size
    }
}

pub(crate) fn load_weight(cx: &Context, linear: HostLinear, residency: Residency) -> Result<WgpuWeight> {
    let size = [linear.rows(), linear.cols()];
    let (product, parts, scales) = match linear.weight() {
        LinearWeight::Int8 { rows, scales, rotation } => {
            let sources = rows.iter().map(WeightRows::int8).collect();
            let scales = concat_f32(scales)?;
            (ProductKind::Int8(*rotation), parts(cx, sources, residency)?, Some(scales))
        }
        LinearWeight::Packed(packed) if linear.nvfp4_matmul() => {
            let (sources, scales) = packed_rows(packed)?;
            (ProductKind::Rounded(Quantized::Nvfp4), parts(cx, sources, residency)?, scales)
        }
        LinearWeight::Packed(packed) if linear.fp8_matmul() && packed.iter().all(PackedTensor::is_fp8) => {
            let (sources, scales) = packed_rows(packed)?;
            (ProductKind::Rounded(Quantized::Fp8), parts(cx, sources, residency)?, scales)
        }
        weight if linear.fp8_matmul() => {
            let (parts, scales) = quantize_weight(cx, weight)?;
            (ProductKind::Rounded(Quantized::Fp8), parts, Some(scales))
        }
        LinearWeight::Dense(matrices) => {
            let sources = matrices.iter().map(WeightRows::dense).collect::<Result<_>>()?;
            (ProductKind::Float, parts(cx, sources, residency)?, None)
        }
        LinearWeight::Packed(packed) => {
            let (sources, scales) = packed_rows(packed)?;
            (ProductKind::Float, parts(cx, sources, residency)?, scales)
        }
    };
    let columns = columns(cx, size[0], scales, linear.bias())?;
    let deltas = deltas(cx, linear.deltas())?;
    Ok(WgpuWeight { matrix: Arc::new(Matrix { size, product, parts, columns }), deltas })
}

pub(crate) fn with_deltas(cx: &Context, w: &WgpuWeight, deltas: Vec<LoraDelta>) -> Result<WgpuWeight> {
    shapes::with_deltas(&deltas, w.size())?;
    Ok(WgpuWeight { matrix: Arc::clone(&w.matrix), deltas: self::deltas(cx, &deltas)? })
}

fn deltas(cx: &Context, deltas: &[LoraDelta]) -> Result<Arc<[Delta]>> {
    let delta = |delta: &LoraDelta| {
        let down = parts(cx, vec![WeightRows::dense(&delta.down)?], Residency::Device)?;
        let mut up = parts(cx, vec![WeightRows::dense(&delta.up)?], Residency::Device)?;
        up.iter_mut().for_each(|part| part.first += delta.row);
        Ok(Delta { rank: delta.rank(), down, up, scale: delta.scale })
    };
    deltas.iter().filter(|delta| delta.rank() > 0 && delta.rows() > 0).map(delta).collect()
}

/// The rows of packed matrices, and the scales of all rows if there are any.
fn packed_rows(packed: &[PackedTensor]) -> Result<(Vec<WeightRows>, Option<Vec<f32>>)> {
    let sources = packed.iter().map(WeightRows::packed).collect::<Result<_>>()?;
    let row_scales =
        |p: &PackedTensor| if p.is_patched() { vec![1.0; p.row_count()] } else { p.row_scales() };
    let scales: Vec<f32> = packed.iter().flat_map(row_scales).collect();
    let has_scales = scales.iter().any(|&scale| scale != 1.0);
    Ok((sources, has_scales.then_some(scales)))
}

/// Quantizes the rows of a weight to fp8, on the device: a slice of rows after the other.
fn quantize_weight(cx: &Context, weight: &LinearWeight) -> Result<(Vec<Part>, Vec<f32>)> {
    let (mut parts, mut scales, mut first) = (Vec::new(), Vec::new(), 0);
    for (i, shape) in weight.shapes().enumerate() {
        let [rows, cols] = [shape.rows(), shape.last()];
        for chunk in cx.row_chunks(0..rows, cols * 4, 1) {
            let values = match weight {
                LinearWeight::Packed(packed) => packed[i].rows(chunk.clone())?.to_f32()?,
                LinearWeight::Dense(dense) | LinearWeight::Int8 { rows: dense, .. } => {
                    dense[i].rows(chunk.clone())?.to_dtype(DType::F32)?
                }
            };
            let values = crate::ops::upload(cx, &values, DType::F32)?;
            let [bytes, row_scales] = quantize_rows(cx, &values, Quantized::E4m3)?;
            scales.extend_from_slice(&crate::ops::download(cx, &row_scales)?.to_f32()?);
            let stride = bytes.shape().last();
            parts.push(Part::resident(first, chunk.len(), "f8_e4m3", stride, bytes.buffer().clone()));
            first += chunk.len();
        }
    }
    Ok((parts, scales))
}

/// Uploads scales and biases of the output columns.
fn columns(cx: &Context, out: usize, scales: Option<Vec<f32>>, bias: Option<&HostTensor>) -> Result<Columns> {
    let (has_scales, has_bias) = (scales.is_some(), bias.is_some());
    if !has_scales && !has_bias {
        return Ok(Columns { values: None, has_scales, has_bias });
    }
    let mut values = scales.unwrap_or_else(|| vec![1.0; out]);
    match bias {
        Some(bias) => values.extend_from_slice(&bias.to_f32()?),
        None => values.resize(2 * out, 0.0),
    }
    let values = crate::ops::upload(cx, &HostTensor::from_f32([2, out], values)?, DType::F32)?;
    Ok(Columns { values: Some(values), has_scales, has_bias })
}

fn concat_f32(tensors: &[HostTensor]) -> Result<Vec<f32>> {
    let mut all = Vec::new();
    for tensor in tensors {
        all.extend_from_slice(&tensor.to_f32()?);
    }
    Ok(all)
}

//! Linear layers: dense, int8, fp8 and nvfp4 matmuls, bias and LoRA deltas.

use kiln_tensor::packed::{BlockScales, PackedTensor, Scales};
use kiln_tensor::{DType, HostLinear, HostTensor, LinearWeight, LoraDelta, Rotation};

use super::movement;
use super::values::{NAME, tensor, values};
use crate::{Error, Residency, Result, RowGroups, fp8, int8, nvfp4, shapes};

/// A linear layer: weight, bias and LoRA deltas.
#[derive(Clone)]
pub struct Linear {
    /// `[out, in]`.
    size: [usize; 2],
    weight: Weight,
    bias: Vec<f64>,
    deltas: Vec<LoraFactors>,
}

/// The weight, row-major.
#[derive(Clone)]
enum Weight {
    Dense(Vec<f64>),
    /// Integers, row scales, and how the rows are rotated.
    Int8(Vec<i8>, Vec<f64>, Rotation),
    /// e4m3 values and row scales.
    Fp8(Vec<f64>, Vec<f64>),
    /// e2m1 values times their blocks' scales, and row scales.
    Nvfp4(Vec<f64>, Vec<f64>),
}

#[derive(Clone)]
struct LoraFactors {
    row: usize,
    rank: usize,
    down: Vec<f64>,
    up: Vec<f64>,
    scale: f64,
}

pub(super) fn load_weight(linear: HostLinear, _: Residency) -> Result<Linear> {
    let size = [linear.rows(), linear.cols()];
    let weight = match linear.weight() {
        LinearWeight::Int8 { rows, scales, rotation } => {
            let integers = rows.iter().flat_map(|rows| rows.bytes().iter().map(|&b| b as i8));
            Weight::Int8(integers.collect(), concat(scales)?, *rotation)
        }
        LinearWeight::Packed(packed) if linear.fp8_matmul() && packed.iter().all(PackedTensor::is_fp8) => {
            let unscaled =
                |p: &PackedTensor| PackedTensor::new(p.format(), p.shape(), p.bytes().clone())?.to_f32();
            let unscaled = packed.iter().map(unscaled).collect::<Result<Vec<_>, _>>()?;
            let scales = packed.iter().flat_map(|p| p.row_scales()).map(f64::from).collect();
            Weight::Fp8(concat(&unscaled)?, scales)
        }
        LinearWeight::Packed(packed) if linear.nvfp4_matmul() => {
            let unscaled = packed.iter().map(without_global_scale).collect::<Result<Vec<_>>>()?;
            let scales = packed.iter().flat_map(|p| p.row_scales()).map(f64::from).collect();
            Weight::Nvfp4(concat(&unscaled)?, scales)
        }
        LinearWeight::Dense(dense) => float_weight(concat(dense)?, size[1], linear.fp8_matmul()),
        LinearWeight::Packed(packed) => {
            let dense = packed.iter().map(PackedTensor::to_f32).collect::<Result<Vec<_>, _>>()?;
            float_weight(concat(&dense)?, size[1], linear.fp8_matmul())
        }
    };
    let bias = match linear.bias() {
        Some(bias) => floats("weight", bias)?,
        None => vec![0.0; size[0]],
    };
    Ok(Linear { size, weight, bias, deltas: lora_factors(linear.deltas())? })
}

pub(super) fn with_deltas(w: &Linear, deltas: Vec<LoraDelta>) -> Result<Linear> {
    shapes::with_deltas(&deltas, w.size)?;
    Ok(Linear { deltas: lora_factors(&deltas)?, ..w.clone() })
}

impl Linear {
    /// `[out, in]`, and the number of LoRA deltas.
    pub(super) fn size(&self) -> ([usize; 2], usize) {
        (self.size, self.deltas.len())
    }

    /// The weight's values, row-major, without bias and deltas.
    pub(super) fn weight_values(&self) -> Vec<f64> {
        let scaled = |values: &mut dyn Iterator<Item = f64>, scales: &[f64]| {
            values.enumerate().map(|(i, value)| value * scales[i / self.size[1]]).collect()
        };
        match &self.weight {
            Weight::Dense(values) => values.clone(),
            Weight::Int8(values, scales, rotation) => {
                let mut values: Vec<f64> = scaled(&mut values.iter().map(|&v| f64::from(v)), scales);
                rotation.rotate(&mut values);
                values
            }
            Weight::Fp8(values, scales) | Weight::Nvfp4(values, scales) => {
                scaled(&mut values.iter().copied(), scales)
            }
        }
    }

    /// `[rows, in]` from the gradient of an fp8 matmul's outputs, `[rows, out]`.
    pub(super) fn fp8_gradient(&self, dy: &[f64]) -> Option<Vec<f64>> {
        let Weight::Fp8(weight, scales) = &self.weight else { return None };
        let [out, cols] = self.size;
        let mut dx = vec![0.0; dy.len() / out * cols];
        for (dy, dx) in dy.chunks(out).zip(dx.chunks_mut(cols)) {
            let scaled: Vec<f64> =
                dy.iter().zip(scales).map(|(dy, s)| f64::from(*dy as f32 * *s as f32)).collect();
            let (q, scale) = quantize_fp8(&scaled);
            for (q, w) in q.iter().zip(weight.chunks(cols)) {
                dx.iter_mut().zip(w).for_each(|(dx, w)| *dx += q * scale * w);
            }
        }
        Some(dx)
    }

    /// `[rows, out]` from `[rows, in]`.
    fn product(&self, x: &[f64]) -> Vec<f64> {
        let [out, cols] = self.size;
        let mut y = Vec::with_capacity(x.len() / cols * out);
        for x in x.chunks(cols) {
            let row = y.len();
            match &self.weight {
                Weight::Dense(weight) => y.extend(weight.chunks(cols).map(|w| dot(x, w))),
                Weight::Int8(weight, scales, rotation) => {
                    y.extend(int8_product(x, weight, scales, *rotation));
                }
                Weight::Fp8(weight, scales) => {
                    let (x, scale) = quantize_fp8(x);
                    y.extend(weight.chunks(cols).zip(scales).map(|(w, row)| dot(&x, w) * scale * row));
                }
                Weight::Nvfp4(weight, scales) => {
                    let (x, scale) = quantize(x, nvfp4::quantize_row);
                    y.extend(weight.chunks(cols).zip(scales).map(|(w, row)| dot(&x, w) * scale * row));
                }
            }
            y[row..].iter_mut().zip(&self.bias).for_each(|(y, bias)| *y += bias);
            for delta in &self.deltas {
                let inner: Vec<f64> = delta.down.chunks(cols).map(|d| dot(x, d)).collect();
                // Rank 0 changes nothing; `chunks(0)` would panic.
                for (i, up) in delta.up.chunks(delta.rank.max(1)).enumerate() {
                    y[row + delta.row + i] += delta.scale * dot(&inner, up);
                }
            }
        }
        y
    }
}

/// A float weight, quantized to fp8 if requested.
fn float_weight(dense: Vec<f64>, cols: usize, fp8: bool) -> Weight {
    if !fp8 {
        return Weight::Dense(dense);
    }
    let rows: Vec<_> = dense.chunks(cols).map(quantize_fp8).collect();
    let scales = rows.iter().map(|(_, scale)| *scale).collect();
    Weight::Fp8(rows.into_iter().flat_map(|(row, _)| row).collect(), scales)
}

/// The concatenated elements of some tensors.
fn concat(tensors: &[HostTensor]) -> Result<Vec<f64>> {
    Ok(tensors.iter().map(|t| floats("weight", t)).collect::<Result<Vec<_>>>()?.concat())
}

fn lora_factors(deltas: &[LoraDelta]) -> Result<Vec<LoraFactors>> {
    let factors = |d: &LoraDelta| {
        Ok(LoraFactors {
            row: d.row,
            rank: d.rank(),
            down: floats("weight", &d.down)?,
            up: floats("weight", &d.up)?,
            scale: d.scale.into(),
        })
    };
    deltas.iter().map(factors).collect()
}

/// The int8 matmul of one row.
fn int8_product(x: &[f64], weight: &[i8], scales: &[f64], rotation: Rotation) -> Vec<f64> {
    // The elements came from f32 or bf16, so this is exact.
    let mut x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    rotation.rotate(&mut x);
    let mut q = vec![0; x.len()];
    let scale = f64::from(int8::quantize_row(&x, &mut q));
    let sum = |w: &[i8]| q.iter().zip(w).map(|(&q, &w)| i64::from(q) * i64::from(w)).sum::<i64>();
    weight.chunks(x.len()).zip(scales).map(|(w, row)| sum(w) as f64 * scale * row).collect()
}

/// Quantizes a row to fp8; returns values and scale.
fn quantize_fp8(x: &[f64]) -> (Vec<f64>, f64) {
    quantize(x, fp8::quantize_row)
}

fn quantize(x: &[f64], quantize_row: fn(&[f32], &mut [f32]) -> f32) -> (Vec<f64>, f64) {
    let x: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    let mut q = vec![0.0; x.len()];
    let scale = quantize_row(&x, &mut q);
    (q.into_iter().map(f64::from).collect(), scale.into())
}

/// The values of an nvfp4 matrix times their blocks' scales.
fn without_global_scale(packed: &PackedTensor) -> Result<HostTensor> {
    let values = PackedTensor::new(packed.format(), packed.shape(), packed.bytes().clone())?;
    let Scales::PerBlock { scales, high_first, .. } = packed.scales() else { return Ok(values.to_f32()?) };
    let scales = BlockScales { scales: scales.into(), swizzled: false, high_first, global: 1.0 };
    Ok(values.with_block_scales(scales)?.to_f32()?)
}

/// The elements of a weight of any float type.
pub(super) fn floats(op: &'static str, t: &HostTensor) -> Result<Vec<f64>> {
    match t.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => values(t),
        dtype => Err(Error::DType { op, dtype, backend: NAME.into() }),
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn linear(x: &HostTensor, w: &Linear) -> Result<HostTensor> {
    let shape = shapes::linear(x, w.size)?;
    tensor(shape, x.dtype(), w.product(&values(x)?))
}

pub(super) fn linear_split<const N: usize>(
    x: &HostTensor,
    w: &Linear,
    widths: [usize; N],
) -> Result<[HostTensor; N]> {
    let shapes = shapes::linear_split(x, w.size, &widths)?;
    let y = w.product(&values(x)?);
    let mut column = 0;
    let mut outputs = Vec::with_capacity(N);
    for shape in shapes {
        let width = shape.last();
        let part = y.chunks(w.size[0]).flat_map(|row| &row[column..column + width]).copied().collect();
        outputs.push(tensor(shape, x.dtype(), part)?);
        column += width;
    }
    outputs.try_into().map_err(|_| Error::Arguments { op: "linear_split", what: "too few widths".into() })
}

pub(super) fn linear_gated_add(
    xs: &[&HostTensor],
    w: &Linear,
    gate: Option<(&HostTensor, &RowGroups)>,
    residual: &HostTensor,
) -> Result<HostTensor> {
    let shape = shapes::linear_gated_add(xs, w.size, gate, residual)?;
    let [out, _] = w.size;
    let mut y = w.product(&values(&movement::concat_columns(xs)?)?);
    if let Some((gate, groups)) = gate {
        let gate = values(gate)?;
        for (row, y) in y.chunks_mut(out).enumerate() {
            let gate = &gate[groups.group_of(row) * out..][..out];
            y.iter_mut().zip(gate).for_each(|(y, gate)| *y *= gate);
        }
    }
    let y = y.iter().zip(values(residual)?).map(|(y, residual)| residual + y).collect();
    tensor(shape, residual.dtype(), y)
}

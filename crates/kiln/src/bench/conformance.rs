//! A short conformance check inside the program: operations on two sizes, compared with the portable CPU kernels.
//!
//! The whole suite is `kiln-conformance`, which is larger than what a check on a stranger's machine may cost.

use kiln_engine::{Device, DeviceInfo, Isa, Settings, TrainingVisitor, with_training_backend};
use kiln_ops::{
    Activation, AttentionMask, AttentionSpec, ConvGeometry, Residency, Result, RopeLayout, RopeTable,
    RowGroups, TrainingBackend,
};
use kiln_tensor::packed::{BlockScales, Format, PackedTensor};
use kiln_tensor::{DType, HostLinear, HostTensor, Rotation, bf16};
use serde::Serialize;

use crate::error::CliError;

/// The results of a check.
#[derive(Debug, Serialize)]
pub struct Conformance {
    pub checked: usize,
    pub failed: usize,
    pub cases: Vec<CaseResult>,
}

/// One operation with one size.
#[derive(Debug, Serialize)]
pub struct CaseResult {
    pub operation: &'static str,
    pub size: String,
    pub dtype: String,
    /// The largest difference in units of the expected values' root mean square; none if there is no finite one.
    pub error: Option<f64>,
    pub limit: f64,
    pub passed: bool,
    /// Why the operation gave no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Runs the operations on the backend that `settings` name, and compares them with the portable CPU kernels.
pub fn check(settings: &Settings) -> Result<Conformance, CliError> {
    let found = with_training_backend(settings, Operations { expected: false })?;
    let portable = Settings { device: Device::Cpu, isa: Some(Isa::Portable), ..settings.clone() };
    let expected = with_training_backend(&portable, Operations { expected: true })?;
    let cases: Vec<CaseResult> = found.iter().filter_map(|found| compare(found, &expected)).collect();
    let failed = cases.iter().filter(|case| !case.passed).count();
    Ok(Conformance { checked: cases.len(), failed, cases })
}

fn compare(found: &Outcome, expected: &[Outcome]) -> Option<CaseResult> {
    let same = |other: &&Outcome| {
        (other.operation, &other.size, other.dtype) == (found.operation, &found.size, found.dtype)
    };
    let expected = expected.iter().find(same)?;
    let (error, problem) = match (&found.values, &expected.values) {
        (Ok(found), Ok(expected)) => (largest_error(found, expected), None),
        (Err(problem), _) | (_, Err(problem)) => (None, Some(problem.clone())),
    };
    let limit = limit(found);
    Some(CaseResult {
        operation: found.operation,
        size: found.size.clone(),
        dtype: found.dtype.to_string(),
        error,
        limit,
        passed: error.is_some_and(|error| error <= limit),
        problem,
    })
}

/// What rounding explains: of sums in f32, of results to bf16, of an int8 input that lies between two steps, of fp8 against
/// the product without it.
fn limit(case: &Outcome) -> f64 {
    match (case.operation, case.dtype) {
        ("linear, fp8", _) => 0.5,
        ("linear, int8" | "linear, rotated int8", _) | (_, DType::BF16) => 0.1,
        _ => 1e-3,
    }
}

fn largest_error(found: &[f32], expected: &[f32]) -> Option<f64> {
    if found.len() != expected.len() {
        return None;
    }
    let squares: f64 = expected.iter().map(|v| f64::from(*v).powi(2)).sum();
    let unit = (squares / expected.len().max(1) as f64).sqrt().max(f64::MIN_POSITIVE);
    let differences = found.iter().zip(expected).map(|(a, b)| f64::from(a - b).abs() / unit);
    // `max` would ignore a NaN.
    let larger = |largest: f64, d: f64| if largest.is_nan() || d <= largest { largest } else { d };
    let largest = differences.fold(0.0, larger);
    largest.is_finite().then_some(largest)
}

/// What an operation gave.
struct Outcome {
    operation: &'static str,
    size: String,
    dtype: DType,
    values: Result<Vec<f32>, String>,
}

/// Runs the operations. On the backend that gives what is `expected`, fp8 and nvfp4 products are computed without these.
struct Operations {
    expected: bool,
}

impl TrainingVisitor for Operations {
    type Output = Vec<Outcome>;

    fn visit<B: TrainingBackend + 'static>(self, b: B, device: DeviceInfo<B>) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for dtype in [DType::F32, DType::BF16] {
            // A size with a tail on every tile and vector, and one of several tiles.
            for (rows, heads) in [(19, 1), (389, 3)] {
                let mut run = Run { b: &b, dtype, rows, heads, outcomes: Vec::new() };
                run.inference();
                if self.expected || device.has_fp8 {
                    run.fp8(!self.expected);
                }
                if self.expected || device.has_nvfp4 {
                    run.nvfp4(!self.expected);
                }
                run.training();
                outcomes.append(&mut run.outcomes);
            }
        }
        outcomes
    }
}

const HEAD_DIM: usize = 128;
const EPS: f32 = 1e-6;

/// The operations of one size and dtype.
struct Run<'a, B: TrainingBackend> {
    b: &'a B,
    dtype: DType,
    rows: usize,
    heads: usize,
    outcomes: Vec<Outcome>,
}

impl<B: TrainingBackend> Run<'_, B> {
    fn add(&mut self, operation: &'static str, run: impl FnOnce(&Self) -> Result<B::Tensor>) {
        let values = run(self).and_then(|y| {
            let host = self.b.download(&y)?;
            Ok(host.to_f32()?.into_owned())
        });
        let size = format!("{} × {}", self.rows, self.dim());
        let values = values.map_err(|error| error.to_string());
        self.outcomes.push(Outcome { operation, size, dtype: self.dtype, values });
    }

    fn dim(&self) -> usize {
        self.heads * HEAD_DIM
    }

    /// An activation of `rows` rows.
    fn x(&self, seed: usize, columns: usize) -> Result<B::Tensor> {
        self.b.upload(&draw(seed, &[self.rows, columns])?.to_dtype(self.dtype)?, self.dtype)
    }

    /// A parameter.
    fn p(&self, seed: usize, shape: &[usize]) -> Result<B::Tensor> {
        self.b.upload(&draw(seed, shape)?, DType::F32)
    }

    /// A layer with `out` outputs, stored as bf16.
    fn layer(&self, out: usize) -> Result<HostLinear> {
        let weights = draw(1, &[out, self.dim()])?.to_dtype(DType::BF16)?;
        Ok(HostLinear::dense(vec![weights])?.with_bias(draw(2, &[out])?)?)
    }

    fn load(&self, layer: HostLinear) -> Result<B::Weight> {
        self.b.load_weight(layer, Residency::Device)
    }

    /// Two groups of rows.
    fn groups(&self) -> RowGroups {
        RowGroups::from_lengths(&[self.rows / 3, self.rows - self.rows / 3])
    }

    fn rope(&self, pairs: RopeLayout) -> Result<RopeTable<B::Tensor>> {
        let angles = draw(3, &[self.rows, HEAD_DIM / 2])?;
        let upload = |f: fn(f32) -> f32| {
            let values = angles.to_f32()?.iter().map(|angle| f(*angle)).collect();
            self.b.upload(&HostTensor::from_f32([self.rows, HEAD_DIM / 2], values)?, DType::F32)
        };
        Ok(RopeTable { cos: upload(f32::cos)?, sin: upload(f32::sin)?, pairs })
    }

    fn attention(&self, mask: AttentionMask) -> AttentionSpec {
        AttentionSpec { heads: self.heads, kv_heads: 1, mask, eight_bits: false }
    }

    fn inference(&mut self) {
        let (dim, heads) = (self.dim(), self.heads);
        self.add("linear", |t| t.b.linear(&t.x(4, dim)?, &t.load(t.layer(2 * dim + 8)?)?));
        for (name, rotation) in [("linear, int8", Rotation::None), ("linear, rotated int8", Rotation::By64)] {
            self.add(name, |t| {
                let bytes = (0..dim * dim).map(|i| (hash(5, i) >> 24) as u8).collect::<Vec<u8>>();
                let weights = HostTensor::new(DType::I8, [dim, dim], bytes.into())?;
                let scales = HostTensor::from_f32([dim], vec![1.0 / 128.0; dim])?;
                let layer = HostLinear::int8(vec![weights], vec![scales], rotation)?;
                t.b.linear(&t.x(4, dim)?, &t.load(layer)?)
            });
        }
        self.add("linear_gated_add", |t| {
            let (gate, groups) = (t.p(6, &[2, dim])?, t.groups());
            let (x, residual) = (t.x(4, dim)?, t.x(7, dim)?);
            t.b.linear_gated_add(&[&x], &t.load(t.layer(dim)?)?, Some((&gate, &groups)), &residual)
        });
        self.add("ada_layer_norm", |t| {
            t.b.ada_layer_norm(&t.x(4, dim)?, &t.p(8, &[2, dim])?, &t.p(9, &[2, dim])?, &t.groups(), EPS)
        });
        self.add("rms_norm", |t| t.b.rms_norm(&t.x(4, dim)?, &t.p(8, &[dim])?, EPS));
        for (name, pairs) in
            [("norm_rope, pairs", RopeLayout::Interleaved), ("norm_rope, halves", RopeLayout::HalfSplit)]
        {
            self.add(name, |t| {
                t.b.norm_rope(&t.x(4, dim)?, Some(&t.p(8, &[HEAD_DIM])?), &t.rope(pairs)?, EPS)
            });
        }
        let causal = AttentionMask::Causal { valid: self.rows - 2 };
        for (name, mask) in [("attention", AttentionMask::None), ("attention, causal", causal)] {
            self.add(name, |t| {
                let (q, k, v) = (t.x(4, dim)?, t.x(10, HEAD_DIM)?, t.x(11, HEAD_DIM)?);
                t.b.attention(&[&q], &[&k], &[&v], &t.attention(mask))
            });
        }
        self.add("swiglu", |t| t.b.swiglu(&t.x(4, 2 * dim)?));
        self.add("activation, gelu", |t| t.b.activation(&t.x(4, dim)?, Activation::Gelu));
        self.add("add_scaled", |t| t.b.add_scaled(&t.x(4, dim)?, &t.x(7, dim)?, -0.3));
        self.add("guide", |t| t.b.guide(&t.x(4, dim)?, &t.x(7, dim)?, 4.0));
        self.add("affine", |t| t.b.affine(&t.x(4, dim)?, &t.p(8, &[dim])?, &t.p(9, &[dim])?));
        let image = |t: &Self, seed| t.b.reshape(&t.x(seed, 24 * heads)?, [t.rows, 3, 8 * heads].into());
        self.add("group_norm", |t| {
            let (weight, bias) = (t.p(8, &[8 * heads])?, t.p(9, &[8 * heads])?);
            t.b.group_norm(&image(t, 4)?, 4, &weight, &bias, EPS, Some(Activation::Silu))
        });
        for (name, upsample) in [("conv2d", false), ("conv2d, upsampled", true)] {
            self.add(name, |t| {
                let conv = t.b.load_conv(&draw(12, &[16, 8 * heads, 3, 3])?, Some(&draw(13, &[16])?))?;
                let geometry = ConvGeometry { upsample, ..ConvGeometry::same(3) };
                t.b.conv2d(&image(t, 4)?, &conv, geometry, None)
            });
        }
        self.add("depth_to_space", |t| t.b.depth_to_space(&image(t, 4)?));
    }

    fn fp8(&mut self, fp8: bool) {
        self.add("linear, fp8", |t| {
            let layer = t.layer(2 * t.dim())?;
            t.b.linear(&t.x(4, t.dim())?, &t.load(if fp8 { layer.with_fp8_matmul()? } else { layer })?)
        });
    }

    fn nvfp4(&mut self, nvfp4: bool) {
        let (rows, dim) = (self.rows, self.dim());
        self.add("linear, nvfp4", |t| {
            // Values of e2m1, the largest in each block: they are not rounded.
            let value = |i: usize| [0.0, 0.5, 1.0, 1.5, -2.0, -3.0, -4.0, 6.0][hash(16, i) as usize >> 29];
            let x = (0..rows * dim).map(|i| if i % 16 == 0 { 6.0 } else { value(i) }).collect();
            let x = t.b.upload(&HostTensor::from_f32([rows, dim], x)?.to_dtype(t.dtype)?, t.dtype)?;
            let bytes = (0..dim * dim / 2).map(|i| (hash(17, i) >> 24) as u8).collect::<Vec<u8>>();
            // From 1/4 to 4.
            let scales = (0..dim * dim / 16).map(|i| 0x28 + (hash(18, i) >> 27) as u8).collect::<Vec<u8>>();
            let scales =
                BlockScales { scales: scales.into(), swizzled: false, high_first: true, global: 1.0 / 64.0 };
            let packed =
                PackedTensor::new(Format::NvFp4, [dim, dim], bytes.into())?.with_block_scales(scales)?;
            let layer = HostLinear::packed(vec![packed])?;
            t.b.linear(&x, &t.load(if nvfp4 { layer.with_nvfp4_matmul()? } else { layer })?)
        });
    }

    fn training(&mut self) {
        let dim = self.dim();
        self.add("linear_backward", |t| {
            let (dy, w) = (t.x(14, dim + 8)?, t.load(t.layer(dim + 8)?)?);
            t.b.linear_backward(&[&dy], &w, None)
        });
        self.add("matmul_nt", |t| t.b.matmul_nt(&t.x(4, dim)?, &t.p(15, &[16, dim])?, 0.5, None));
        self.add("matmul_nn", |t| t.b.matmul_nn(&t.x(14, 16)?, &t.p(15, &[16, dim])?, 0.5, None));
        self.add("matmul_tn", |t| t.b.matmul_tn(&t.x(14, 16)?, &t.x(4, dim)?, 0.5, None));
        self.add("swiglu_backward", |t| t.b.swiglu_backward(&t.x(14, dim)?, &t.x(4, 2 * dim)?));
        self.add("ada_layer_norm_backward", |t| {
            let (dy, x, scale) = (t.x(14, dim)?, t.x(4, dim)?, t.p(8, &[2, dim])?);
            t.b.ada_layer_norm_backward(&dy, &x, &scale, &t.groups(), EPS, None)
        });
        self.add("norm_rope_backward", |t| {
            let (dy, x, weight) = (t.x(14, dim)?, t.x(4, dim)?, t.p(8, &[HEAD_DIM])?);
            t.b.norm_rope_backward(&dy, &x, Some(&weight), &t.rope(RopeLayout::Interleaved)?, EPS)
        });
        self.add("attention_backward", |t| {
            let spec = t.attention(AttentionMask::None);
            let (q, k, v, dy) = (t.x(4, dim)?, t.x(10, HEAD_DIM)?, t.x(11, HEAD_DIM)?, t.x(14, dim)?);
            let [out, lse] = t.b.attention_lse(&[&q], &[&k], &[&v], &spec)?;
            let [_, dk, _] = t.b.attention_backward(&[&dy], &[&q], &[&k], &[&v], &out, &lse, &spec)?;
            Ok(dk)
        });
    }
}

/// Values between -1 and 1, the same in every run.
fn draw(seed: usize, shape: &[usize]) -> Result<HostTensor> {
    let value = |i: usize| (hash(seed, i) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    // Representable in bf16, so that both backends have the same inputs in every dtype.
    let values = (0..shape.iter().product()).map(|i| bf16::from_f32(value(i)).to_f32()).collect();
    Ok(HostTensor::from_f32(shape, values)?)
}

fn hash(seed: usize, i: usize) -> u32 {
    let mixed = (i as u32).wrapping_add((seed as u32).wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    let mixed = (mixed ^ mixed >> 15).wrapping_mul(0xc2b2_ae35);
    mixed ^ mixed >> 13
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_number_and_a_nan_are_errors() {
        let expected = vec![1.0f32; 100];
        let mut found = expected.clone();
        assert_eq!(largest_error(&found, &expected), Some(0.0));
        found[50] = 1.5;
        assert_eq!(largest_error(&found, &expected), Some(0.5));
        found[3] = f32::NAN;
        assert_eq!(largest_error(&found, &expected), None);
        assert_eq!(largest_error(&found[1..], &expected), None);
    }
}

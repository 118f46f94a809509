//! Elementwise operations, with normal, heavy-tailed, tiny and huge values.

use kiln_ops::{Activation, Backend, Result, TrainingBackend};
use kiln_tensor::{DType, HostTensor, Shape};

use super::list::{CaseList, ODD};
use crate::Tolerance;
use crate::case_run::{CaseRun, Scenario};
use crate::random::{Distribution, HEAVY_TAILED, NORMAL};

pub(super) fn add_cases<B: TrainingBackend>(list: &mut CaseList<B>) {
    for (situation, values) in [
        ("odd_tails", NORMAL),
        ("heavy_tailed", HEAVY_TAILED.scaled(4.0)),
        ("tiny", NORMAL.scaled(1e-15)),
        ("huge", NORMAL.scaled(1e15)),
    ] {
        list.add(&format!("swiglu/{situation}"), Swiglu(values));
        for (name, f) in [
            ("silu", Activation::Silu),
            ("relu", Activation::Relu),
            ("soft_clamp", Activation::SoftClamp),
            ("gelu", Activation::Gelu),
        ] {
            list.add(&format!("activation/{name}_{situation}"), Unary { f, values });
        }
        for (name, f) in [
            ("add", BinaryOp::Add),
            ("add_scaled", BinaryOp::AddScaled),
            ("lerp", BinaryOp::Lerp),
            ("guide", BinaryOp::Guide),
        ] {
            list.add(&format!("{name}/{situation}"), Binary { f, values });
        }
        list.add(&format!("blend_rows/{situation}"), BlendRows(values));
        list.add(&format!("affine/{situation}"), Affine(values));
        list.add(&format!("relative_l1/{situation}"), RelativeL1(values));
    }
    list.add("activation/extremes", Extremes);
    list.add_once("invalid_arguments/elementwise", Invalid);
}

/// Returns shapes with a tail, of every rank, and one that is large enough to be split between threads.
fn shapes() -> Vec<Shape> {
    let mut shapes: Vec<Shape> = ODD.iter().map(|&n| [n].into()).collect();
    shapes.extend([[3, 5, 7].into(), [2, 33].into(), [0, 4].into(), [129, 1031].into()]);
    shapes
}

struct Unary {
    f: Activation,
    values: Distribution,
}

impl Scenario for Unary {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for shape in shapes() {
            let x = t.activation(self.values, &shape)?;
            let y = t.b.activation(&x, self.f)?;
            t.record(format!("shape {shape}"), &y, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
        }
        Ok(())
    }
}

/// Arguments whose exponential overflows or underflows, each in a separate tensor so that none hides behind the others.
struct Extremes;

impl Scenario for Extremes {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for x in [0.0, -0.0, 20.0, -20.0, 80.0, -80.0, 89.0, -89.0, 104.0, -104.0, 1e4, -1e4, 3e38, -3e38] {
            let tensor = t.upload_activation(&HostTensor::from_f32([17], vec![x; 17])?)?;
            for f in [Activation::Silu, Activation::Relu, Activation::SoftClamp, Activation::Gelu] {
                let y = t.b.activation(&tensor, f)?;
                // For large negative x, x / (1 + exp(-x)) inherits the error of the argument of exp.
                let tolerance = Tolerance::ELEMENTWISE.conditioned(10.0).rounded(t.dtype);
                t.record(format!("{f:?} of {x:e}"), &y, tolerance)?;
            }
        }
        Ok(())
    }
}

struct Swiglu(Distribution);

impl Scenario for Swiglu {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let sizes = ODD.map(|n| [3, n]).into_iter().chain([[0, 4], [1, 1000], [65, 1537]]);
        for [rows, n] in sizes {
            let x = t.activation(self.0, [rows, 2 * n])?;
            let y = t.b.swiglu(&x)?;
            t.record(format!("{rows}x{n}"), &y, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum BinaryOp {
    Add,
    AddScaled,
    Lerp,
    Guide,
}

struct Binary {
    f: BinaryOp,
    values: Distribution,
}

impl Scenario for Binary {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for shape in shapes() {
            let (x, y) = (t.activation(self.values, &shape)?, t.activation(self.values, &shape)?);
            let factors: &[f32] = match self.f {
                BinaryOp::Add => &[1.0],
                BinaryOp::AddScaled => &[-0.0625, 0.3],
                BinaryOp::Lerp => &[0.0, 1.0, 0.7],
                BinaryOp::Guide => &[1.0, 4.0],
            };
            for &s in factors {
                let z = match self.f {
                    BinaryOp::Add => t.b.add(&x, &y)?,
                    BinaryOp::AddScaled => t.b.add_scaled(&x, &y, s)?,
                    BinaryOp::Lerp => t.b.lerp(&x, &y, s)?,
                    BinaryOp::Guide => t.b.guide(&x, &y, s)?,
                };
                // c - u is rounded to the precision of a large u, and may cancel.
                let condition = if matches!(self.f, BinaryOp::Guide) { 10.0 } else { 1.0 };
                let tolerance = sum_tolerance(&shape).conditioned(condition).rounded(t.dtype);
                t.record(format!("shape {shape}, factor {s}"), &z, tolerance)?;
            }
        }
        Ok(())
    }
}

/// Tolerance for sums that may cancel: in a tensor of a few elements all may, and then the result's scale says nothing about
/// that of the terms.
fn sum_tolerance(shape: &Shape) -> Tolerance {
    Tolerance::ELEMENTWISE.conditioned(if shape.numel() < 16 { 20.0 } else { 1.0 })
}

struct BlendRows(Distribution);

impl Scenario for BlendRows {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        for dim in ODD {
            for rows in [1, 6] {
                let shape = Shape::from([rows, dim]);
                let (x, y) = (t.activation(self.0, &shape)?, t.activation(self.0, &shape)?);
                let mask = HostTensor::from_f32([rows], [0.0, 1.0, 0.5, 0.3, 0.9, 1.0][6 - rows..].to_vec())?;
                let mask = t.b.upload(&mask, DType::F32)?;
                let z = t.b.blend_rows(&x, &y, &mask)?;
                t.record(format!("{rows}x{dim}"), &z, sum_tolerance(&shape).rounded(t.dtype))?;
            }
        }
        Ok(())
    }
}

struct RelativeL1(Distribution);

/// The values of an activation.
fn x_host<B: Backend>(t: &CaseRun<'_, B>, x: &B::Tensor) -> Result<Vec<f32>> {
    Ok(t.b.download(x)?.to_f32()?.into_owned())
}

impl Scenario for RelativeL1 {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let mut shapes = shapes();
        shapes.push([300, 4096].into());
        for shape in shapes {
            let (x, y) = (t.activation(self.0, &shape)?, t.activation(self.0, &shape)?);
            let tolerance = Tolerance::sum(shape.numel());
            let z = t.b.relative_l1(&x, &y)?;
            t.record_as(format!("shape {shape}"), &z, DType::F32, tolerance)?;
            let z = t.b.relative_l1(&x, &x)?;
            t.record_as(format!("shape {shape}, equal"), &z, DType::F32, Tolerance::EXACT)?;
            // One value that is not finite, at the end or in the middle.
            let values = x_host(t, &x)?;
            for (at, value) in [(shape.numel().wrapping_sub(1), f32::NAN), (shape.numel() / 2, f32::INFINITY)]
            {
                let mut values = values.clone();
                let Some(one) = values.get_mut(at) else { continue };
                *one = value;
                let x = t.b.upload(&HostTensor::from_f32(&shape, values)?, t.dtype)?;
                let z = t.b.download(&t.b.relative_l1(&x, &x)?)?;
                let is_nan = z.to_f32()?.iter().all(|z| z.is_nan());
                t.record_bytes(format!("shape {shape}, {value} at {at} gives NaN"), &[u8::from(is_nan)])?;
            }
        }
        Ok(())
    }
}

struct Affine(Distribution);

impl Scenario for Affine {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let sizes =
            ODD.iter().map(|&n| Shape::from([5, n])).chain([[3, 5, 32].into(), [7].into(), [0, 4].into()]);
        for shape in sizes {
            let x = t.activation(self.0, &shape)?;
            let (scale, shift) = (t.parameter(NORMAL, [shape.last()])?, t.parameter(self.0, [shape.last()])?);
            let y = t.b.affine(&x, &scale, &shift)?;
            t.record(format!("shape {shape}"), &y, sum_tolerance(&shape).rounded(t.dtype))?;
        }
        Ok(())
    }
}

/// Calls that every backend must reject with the same message.
struct Invalid;

impl Scenario for Invalid {
    fn run<B: Backend>(&self, t: &mut CaseRun<'_, B>) -> Result<()> {
        let b = t.b;
        let (x, flat) = (t.zeros([3, 8], DType::F32)?, t.zeros([8], DType::F32)?);
        t.reject("swiglu: odd columns", b.swiglu(&t.zeros([3, 7], DType::F32)?));
        t.reject("swiglu: a vector", b.swiglu(&flat));
        for (kind, y) in [
            ("shapes", t.zeros([8, 3], DType::F32)?),
            ("ranks", t.zeros([24], DType::F32)?),
            ("types", t.zeros([3, 8], DType::BF16)?),
        ] {
            t.reject(format!("add: other {kind}"), b.add(&x, &y));
            t.reject(format!("add_scaled: other {kind}"), b.add_scaled(&x, &y, 2.0));
            t.reject(format!("lerp: other {kind}"), b.lerp(&x, &y, 0.5));
            t.reject(format!("guide: other {kind}"), b.guide(&x, &y, 4.0));
            t.reject(format!("relative_l1: other {kind}"), b.relative_l1(&x, &y));
            t.reject(format!("blend_rows: other {kind}"), b.blend_rows(&x, &y, &t.zeros([3], DType::F32)?));
        }
        t.reject("blend_rows: a long mask", b.blend_rows(&x, &x, &t.zeros([4], DType::F32)?));
        t.reject("blend_rows: a mask column", b.blend_rows(&x, &x, &t.zeros([3, 1], DType::F32)?));
        t.reject("blend_rows: a bf16 mask", b.blend_rows(&x, &x, &t.zeros([3], DType::BF16)?));
        t.reject("blend_rows: vectors", b.blend_rows(&flat, &flat, &flat));
        let scalar = b.upload(&HostTensor::zeros(Shape::default()), DType::F32)?;
        t.reject("affine: a scalar", b.affine(&scalar, &flat, &flat));
        t.reject("affine: a short scale", b.affine(&x, &t.zeros([7], DType::F32)?, &flat));
        t.reject("affine: a short shift", b.affine(&x, &flat, &t.zeros([7], DType::F32)?));
        t.reject("affine: a bf16 shift", b.affine(&x, &flat, &t.zeros([8], DType::BF16)?));
        Ok(())
    }
}

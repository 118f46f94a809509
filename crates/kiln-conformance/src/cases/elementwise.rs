use kiln_ops::{Activation, Backend, Result};
use kiln_tensor::{HostTensor, Shape};

use super::{List, ODD};
use crate::Tolerance;
use crate::bench::{Bench, Scenario};
use crate::random::{HEAVY, NORMAL, Values};

pub(super) fn list<B: Backend>(list: &mut List<B>) {
    for (kind, values) in [
        ("odd_tails", NORMAL),
        ("heavy_tailed", HEAVY.times(4.0)),
        ("tiny", NORMAL.times(1e-15)),
        ("huge", NORMAL.times(1e15)),
    ] {
        list.add(&format!("swiglu/{kind}"), Swiglu(values));
        for (name, f) in
            [("silu", Activation::Silu), ("relu", Activation::Relu), ("soft_clamp", Activation::SoftClamp)]
        {
            list.add(&format!("activation/{name}_{kind}"), Single { f, values });
        }
        for (name, f) in
            [("add", Two::Add), ("add_scaled", Two::AddScaled), ("lerp", Two::Lerp), ("guide", Two::Guide)]
        {
            list.add(&format!("{name}/{kind}"), Pair { f, values });
        }
        list.add(&format!("blend_rows/{kind}"), BlendRows(values));
        list.add(&format!("affine/{kind}"), Affine(values));
    }
    list.add("activation/extremes", Extremes);
}

/// Shapes with a tail, of every rank, and one large enough to be shared between threads.
fn shapes() -> Vec<Shape> {
    let mut shapes: Vec<Shape> = ODD.iter().map(|&n| [n].into()).collect();
    shapes.extend([[3, 5, 7].into(), [2, 33].into(), [0, 4].into(), [129, 1031].into()]);
    shapes
}

struct Single {
    f: Activation,
    values: Values,
}

impl Scenario for Single {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        for shape in shapes() {
            let x = t.activation(self.values, &shape)?;
            let y = t.b.activation(&x, self.f)?;
            t.put(format!("shape {shape}"), &y, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
        }
        Ok(())
    }
}

/// Arguments whose exponential overflows or vanishes, each in a tensor of its own so that none hides behind the others.
struct Extremes;

impl Scenario for Extremes {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        for x in [0.0, -0.0, 20.0, -20.0, 80.0, -80.0, 89.0, -89.0, 104.0, -104.0, 1e4, -1e4, 3e38, -3e38] {
            let tensor = t.activation_of(&HostTensor::from_f32([17], vec![x; 17])?)?;
            for f in [Activation::Silu, Activation::Relu, Activation::SoftClamp] {
                let y = t.b.activation(&tensor, f)?;
                // Far down, x / (1 + exp(-x)) inherits the error of the argument of exp.
                let tolerance = Tolerance::ELEMENTWISE.conditioned(10.0).rounded(t.dtype);
                t.put(format!("{f:?} of {x:e}"), &y, tolerance)?;
            }
        }
        Ok(())
    }
}

struct Swiglu(Values);

impl Scenario for Swiglu {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let sizes = ODD.map(|n| [3, n]).into_iter().chain([[0, 4], [1, 1000], [65, 1537]]);
        for [rows, n] in sizes {
            let x = t.activation(self.0, [rows, 2 * n])?;
            let y = t.b.swiglu(&x)?;
            t.put(format!("{rows}x{n}"), &y, Tolerance::ELEMENTWISE.rounded(t.dtype))?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Two {
    Add,
    AddScaled,
    Lerp,
    Guide,
}

struct Pair {
    f: Two,
    values: Values,
}

impl Scenario for Pair {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        for shape in shapes() {
            let (x, y) = (t.activation(self.values, &shape)?, t.activation(self.values, &shape)?);
            let factors: &[f32] = match self.f {
                Two::Add => &[1.0],
                Two::AddScaled => &[-0.0625, 0.3],
                Two::Lerp => &[0.0, 1.0, 0.7],
                Two::Guide => &[1.0, 4.0],
            };
            for &s in factors {
                let z = match self.f {
                    Two::Add => t.b.add(&x, &y)?,
                    Two::AddScaled => t.b.add_scaled(&x, &y, s)?,
                    Two::Lerp => t.b.lerp(&x, &y, s)?,
                    Two::Guide => t.b.guide(&x, &y, s)?,
                };
                // A large u rounds c - u to its own precision, and may then cancel.
                let condition = if matches!(self.f, Two::Guide) { 10.0 } else { 1.0 };
                let tolerance = cancelling(&shape).conditioned(condition).rounded(t.dtype);
                t.put(format!("shape {shape}, factor {s}"), &z, tolerance)?;
            }
        }
        Ok(())
    }
}

/// In a tensor of a few elements all sums may cancel, and then their own size says nothing about their terms'.
fn cancelling(shape: &Shape) -> Tolerance {
    Tolerance::ELEMENTWISE.conditioned(if shape.numel() < 16 { 20.0 } else { 1.0 })
}

struct BlendRows(Values);

impl Scenario for BlendRows {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        for dim in ODD {
            for rows in [1, 6] {
                let shape = Shape::from([rows, dim]);
                let (x, y) = (t.activation(self.0, &shape)?, t.activation(self.0, &shape)?);
                let mask = HostTensor::from_f32([rows], [0.0, 1.0, 0.5, 0.3, 0.9, 1.0][6 - rows..].to_vec())?;
                let mask = t.b.upload(&mask, kiln_tensor::DType::F32)?;
                let z = t.b.blend_rows(&x, &y, &mask)?;
                t.put(format!("{rows}x{dim}"), &z, cancelling(&shape).rounded(t.dtype))?;
            }
        }
        Ok(())
    }
}

struct Affine(Values);

impl Scenario for Affine {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()> {
        let sizes =
            ODD.iter().map(|&n| Shape::from([5, n])).chain([[3, 5, 32].into(), [7].into(), [0, 4].into()]);
        for shape in sizes {
            let x = t.activation(self.0, &shape)?;
            let (scale, shift) = (t.parameter(NORMAL, [shape.last()])?, t.parameter(self.0, [shape.last()])?);
            let y = t.b.affine(&x, &scale, &shift)?;
            t.put(format!("shape {shape}"), &y, cancelling(&shape).rounded(t.dtype))?;
        }
        Ok(())
    }
}

//! The reference backend: plain loops from the formulas of [`Backend`].
//!
//! An operation is a function of its name in one of these modules. Every sum is in f64 and the result is rounded once, at the end. Never optimize this code: fast backends are tested
//! against it. It is itself tested against torch (`tests/golden`).

mod attention;
mod conv;
mod elementwise;
mod linear;
mod movement;
mod norm;
mod training;

use kiln_tensor::bf16;

use crate::signatures::*;
use crate::{Backend, Error, Tensor, TrainingBackend};
use {attention::*, conv::*, elementwise::*, linear::*, movement::*, norm::*, training::*};

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

/// Calls the function of an operation's name.
macro_rules! call {
    ($self:ident, $op:ident $arguments:tt) => { self::$op $arguments };
}

impl Backend for Reference {
    type Tensor = HostTensor;
    type Weight = Linear;
    type Conv = Conv;
    type GraphCache = ();

    fn name(&self) -> String {
        NAME.into()
    }

    backend_methods!(required, call);
}

impl TrainingBackend for Reference {
    type Quantized = Quantized8;

    training_methods!(required, call);
}

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
mod values;

use self::attention::*;
use self::conv::*;
use self::elementwise::*;
use self::linear::*;
use self::movement::*;
use self::norm::*;
use self::training::*;
use crate::signatures::*;
use crate::{Backend, Tensor, TrainingBackend};

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
        values::NAME.into()
    }

    backend_methods!(required, call);
}

impl TrainingBackend for Reference {
    type Quantized = Quantized8;

    training_methods!(required, call);
}

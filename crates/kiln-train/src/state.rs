//! What a trainer reports, and what it is saved as.

use std::collections::BTreeMap;

use kiln_ops::{Tensor as _, TrainingBackend};
use kiln_tensor::{DType, HostTensor};

use crate::{Error, Result};

/// The outcome of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The step, counted from 1.
    pub step: u64,
    /// Mean squared error of the velocity, over all examples of the step.
    pub loss: f32,
    /// Norm of the gradient over all tensors, before clipping.
    pub grad_norm: f32,
    /// The learning rate of this step. With Prodigy, that times the estimated distance.
    pub learning_rate: f32,
}

/// Everything that a training needs to continue bit for bit, apart from the base model, the settings and the data.
#[derive(Clone, Debug, Default)]
pub struct TrainerState {
    /// Steps taken.
    pub step: u64,
    /// Adapter weights, optimizer state and moving averages by name; f32, or u8 for 8-bit state.
    pub tensors: BTreeMap<String, HostTensor>,
    /// Numbers of the optimizer by name.
    pub numbers: BTreeMap<String, f64>,
}

/// What states call the moments.
pub(crate) const NAMES: [&str; 3] = ["m", "v", "s"];

/// Replaces a tensor by the one of this name in a saved state.
pub(crate) fn upload<B: TrainingBackend>(
    b: &B,
    to: &mut B::Tensor,
    name: &str,
    state: &TrainerState,
) -> Result<()> {
    let host = find(&state.tensors, name)?;
    if host.shape() != to.shape() {
        let (found, expected) = (host.shape(), to.shape());
        return Err(Error::State(format!("`{name}` has shape {found}, expected {expected}")));
    }
    *to = b.upload(host, DType::F32)?;
    Ok(())
}

pub(crate) fn find<'a>(tensors: &'a BTreeMap<String, HostTensor>, name: &str) -> Result<&'a HostTensor> {
    tensors.get(name).ok_or_else(|| Error::State(format!("the state has no tensor `{name}`")))
}

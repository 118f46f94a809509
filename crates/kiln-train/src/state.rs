//! What a trainer reports, and what it is saved as.

use std::collections::BTreeMap;

use kiln_tensor::HostTensor;

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

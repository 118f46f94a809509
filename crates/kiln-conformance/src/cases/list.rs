//! What every family of cases adds to.

use std::sync::Arc;

use kiln_ops::TrainingBackend;
use kiln_tensor::DType;

use crate::Case;
use crate::case_run::Scenario;

/// Widths that leave a tail on every vector width, and their neighbours.
pub(super) const ODD: [usize; 14] = [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129];

/// The cases so far.
pub(super) struct CaseList<B>(pub Vec<Case<B>>);

impl<B: TrainingBackend> CaseList<B> {
    /// Adds a case with f32 activations and one with bf16 activations.
    pub fn add(&mut self, name: &str, scenario: impl Scenario) {
        let scenario = Arc::new(scenario);
        for dtype in [DType::F32, DType::BF16] {
            self.0.push(Case::new(format!("{name}/{dtype}"), dtype, Arc::clone(&scenario)));
        }
    }

    /// Adds a case that does not depend on the dtype of activations.
    pub fn add_once(&mut self, name: &str, scenario: impl Scenario) {
        self.0.push(Case::new(name.into(), DType::F32, Arc::new(scenario)));
    }
}

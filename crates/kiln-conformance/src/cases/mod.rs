//! The list of all cases. Their names seed their random inputs: renaming a case changes its values.

mod attention;
mod conv;
mod elementwise;
mod fp8;
mod int8;
mod linear;
mod movement;
mod norm;
mod packed;
mod rope;
mod training;

use std::sync::Arc;

use kiln_ops::TrainingBackend;
use kiln_tensor::DType;

use crate::Case;
use crate::case_run::Scenario;

/// Widths that leave a tail on every vector width, and their neighbours.
const ODD: [usize; 14] = [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129];

/// Returns every case, for backends of type `B`.
pub fn cases<B: TrainingBackend>() -> Vec<Case<B>> {
    let mut list = CaseList(Vec::new());
    linear::add_cases(&mut list);
    int8::add_cases(&mut list);
    fp8::add_cases(&mut list);
    packed::add_cases(&mut list);
    norm::add_cases(&mut list);
    rope::add_cases(&mut list);
    attention::add_cases(&mut list);
    elementwise::add_cases(&mut list);
    movement::add_cases(&mut list);
    conv::add_cases(&mut list);
    training::add_cases(&mut list);
    list.0
}

struct CaseList<B>(Vec<Case<B>>);

impl<B: TrainingBackend> CaseList<B> {
    /// Adds a case with f32 activations and one with bf16 activations.
    fn add(&mut self, name: &str, scenario: impl Scenario) {
        let scenario = Arc::new(scenario);
        for dtype in [DType::F32, DType::BF16] {
            self.0.push(Case::new(format!("{name}/{dtype}"), dtype, Arc::clone(&scenario)));
        }
    }

    /// Adds a case that does not depend on the dtype of activations.
    fn add_once(&mut self, name: &str, scenario: impl Scenario) {
        self.0.push(Case::new(name.into(), DType::F32, Arc::new(scenario)));
    }
}

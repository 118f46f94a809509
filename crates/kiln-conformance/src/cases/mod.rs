mod attention;
mod conv;
mod elementwise;
mod fp8;
mod int8;
mod linear;
mod movement;
mod norm;
mod packed;
mod refusals;
mod rope;

use std::sync::Arc;

use kiln_ops::Backend;
use kiln_tensor::DType;

use crate::Case;
use crate::bench::Scenario;

/// Widths that leave a tail on every vector width, and the widths beside the tails.
const ODD: [usize; 14] = [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129];

/// Every case, for backends of type `B`.
pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut list = List(Vec::new());
    linear::list(&mut list);
    int8::list(&mut list);
    fp8::list(&mut list);
    packed::list(&mut list);
    norm::list(&mut list);
    rope::list(&mut list);
    attention::list(&mut list);
    elementwise::list(&mut list);
    movement::list(&mut list);
    conv::list(&mut list);
    refusals::list(&mut list);
    list.0
}

struct List<B>(Vec<Case<B>>);

impl<B: Backend> List<B> {
    /// A case with f32 activations and one with bf16 activations.
    fn add(&mut self, name: &str, scenario: impl Scenario) {
        let scenario = Arc::new(scenario);
        for dtype in [DType::F32, DType::BF16] {
            self.0.push(Case::new(format!("{name}/{dtype}"), dtype, Arc::clone(&scenario)));
        }
    }

    /// A case to which the dtype of activations means nothing.
    fn add_once(&mut self, name: &str, scenario: impl Scenario) {
        self.0.push(Case::new(name.into(), DType::F32, Arc::new(scenario)));
    }
}

//! The list of all cases. Their names seed their random inputs: renaming a case changes its values.

mod attention;
mod conv;
mod elementwise;
mod fp8;
mod int8;
mod linear;
mod list;
mod movement;
mod norm;
mod nvfp4;
mod packed;
mod quantized;
mod rope;
mod training;

use kiln_ops::TrainingBackend;

use self::list::CaseList;
use crate::Case;

/// Returns every case, for backends of type `B`.
pub fn cases<B: TrainingBackend>() -> Vec<Case<B>> {
    let mut list = CaseList(Vec::new());
    linear::add_cases(&mut list);
    int8::add_cases(&mut list);
    fp8::add_cases(&mut list);
    nvfp4::add_cases(&mut list);
    quantized::add_cases(&mut list);
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

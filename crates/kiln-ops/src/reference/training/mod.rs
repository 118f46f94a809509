//! The operations of training: plain loops from the formulas of [`TrainingBackend`](crate::TrainingBackend), sums in f64.

mod adapter;
mod attention;
mod backward;
mod optimizer;

pub(super) use adapter::*;
pub(super) use attention::*;
pub(super) use backward::*;
pub(super) use optimizer::*;

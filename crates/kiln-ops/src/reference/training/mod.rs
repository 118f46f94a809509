//! The operations of training: plain loops from the formulas of [`TrainingBackend`](crate::TrainingBackend), sums in f64.

mod adapter;
mod attention;
mod backward;
mod optimizer;

use kiln_tensor::HostTensor;

use super::{tensor, values};
use crate::Result;
use crate::training::shapes;
pub(super) use {adapter::*, attention::*, backward::*, optimizer::*};

type T = HostTensor;

/// `values`, plus those of `add`.
fn plus(mut values: Vec<f64>, add: Option<&T>) -> Result<Vec<f64>> {
    if let Some(add) = add {
        values.iter_mut().zip(super::values(add)?).for_each(|(value, add)| *value += add);
    }
    Ok(values)
}

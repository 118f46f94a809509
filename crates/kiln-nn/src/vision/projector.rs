//! The projector: from patches of the vision tower to embeddings of the language model.

use kiln_ops::{Activation, Backend, Tensor as _};
use kiln_tensor::DType;
use kiln_weights::Vars;

use super::config::{EPS, MERGED_PATCHES};
use crate::{Error, ResidencyPlan, Result};

pub(super) struct Projector<B: Backend> {
    norm: B::Tensor,
    merging_layer: B::Weight,
    linear_1: B::Weight,
    linear_2: B::Weight,
}

impl<B: Backend> Projector<B> {
    /// `dim` is the width of the vision tower, `text_dim` that of the language model.
    pub fn load(b: &B, vars: &Vars<'_>, dim: usize, text_dim: usize, plan: &ResidencyPlan) -> Result<Self> {
        let merged = dim * MERGED_PATCHES * MERGED_PATCHES;
        let linear =
            |name: &str, rows, columns| Ok::<_, Error>(plan.load(b, vars.linear(name, rows, columns)?)?);
        Ok(Projector {
            norm: b.upload(&vars.tensor("norm.weight", [dim])?, DType::F32)?,
            merging_layer: linear("patch_merger.merging_layer", dim, merged)?,
            linear_1: linear("linear_1", text_dim, dim)?,
            linear_2: linear("linear_2", text_dim, text_dim)?,
        })
    }

    /// `x`: `[rows · columns, dim]`, both counts even; result `[rows · columns / 4, text_dim]`.
    pub fn forward(&self, b: &B, x: &B::Tensor, [rows, columns]: [usize; 2]) -> Result<B::Tensor> {
        let dim = x.shape().last();
        let x = b.rms_norm(x, &self.norm, EPS)?;
        let x = b.space_to_depth(&b.reshape(&x, [rows, columns, dim].into())?)?;
        let x = b.reshape(&x, [rows * columns / 4, 4 * dim].into())?;
        let x = b.linear(&b.linear(&x, &self.merging_layer)?, &self.linear_1)?;
        Ok(b.linear(&b.activation(&x, Activation::Gelu)?, &self.linear_2)?)
    }
}

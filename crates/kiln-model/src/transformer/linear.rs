use std::ops::Deref;

use kiln_ops::{Backend, Residency};
use kiln_weights::Vars;

use crate::{ResidencyPlan, Result};

/// A linear layer that other LoRAs can be laid over while the model stays loaded. Used like the weight it holds.
pub(super) struct Linear<B: Backend> {
    weight: B::Weight,
    residency: Residency,
    /// The whole names of the layers it stacks, with their rows.
    layers: Vec<(String, usize)>,
    cols: usize,
    /// A LoRA has changed the weight itself.
    merged: bool,
}

impl<B: Backend> Deref for Linear<B> {
    type Target = B::Weight;

    fn deref(&self) -> &B::Weight {
        &self.weight
    }
}

impl<B: Backend> Linear<B> {
    pub(super) fn load(
        b: &B,
        vars: &Vars<'_>,
        plan: &ResidencyPlan,
        leaf: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        Self::load_stack(b, vars, plan, &[(leaf, rows)], cols)
    }

    /// Several layers of one input as one.
    pub(super) fn load_stack(
        b: &B,
        vars: &Vars<'_>,
        plan: &ResidencyPlan,
        leaves: &[(&str, usize)],
        cols: usize,
    ) -> Result<Self> {
        let parts = vars.linear_stack(leaves, cols)?;
        let residency = plan.place(&parts);
        Ok(Linear {
            weight: b.weight(parts, residency)?,
            residency,
            layers: leaves.iter().map(|&(leaf, rows)| (vars.name(leaf), rows)).collect(),
            cols,
            merged: vars.is_merged(leaves, cols),
        })
    }

    /// The same layer under the LoRAs of `root`. Only a weight that they change, or have changed, is loaded again.
    pub(super) fn relaid(&self, b: &B, root: &Vars<'_>) -> Result<Self> {
        let leaves: Vec<(&str, usize)> =
            self.layers.iter().map(|(name, rows)| (name.as_str(), *rows)).collect();
        let merged = root.is_merged(&leaves, self.cols);
        let weight = match merged || self.merged {
            true => b.weight(root.linear_stack(&leaves, self.cols)?, self.residency)?,
            false => b.with_deltas(&self.weight, root.deltas(&leaves, self.cols)?)?,
        };
        Ok(Linear { weight, residency: self.residency, layers: self.layers.clone(), cols: self.cols, merged })
    }

    /// The layers that it stacks.
    #[cfg(test)]
    pub(super) fn shapes(&self) -> Vec<kiln_weights::LayerShape> {
        let shape = |(name, rows): &(String, usize)| kiln_weights::LayerShape {
            name: name.clone(),
            rows: *rows,
            cols: self.cols,
        };
        self.layers.iter().map(shape).collect()
    }
}

//! Linear layers whose LoRAs can be changed while the model stays loaded.
//!
//! All layers are prepared before the first is replaced, so a LoRA that doesn't fit changes nothing. The weights are shared:
//! changing the LoRAs of klein 4B takes 0.3 ms.

use std::ops::Deref;

use kiln_ops::{Backend, Residency};
use kiln_weights::Vars;

use crate::{ResidencyPlan, Result};

/// A linear layer, one or several stacked. Dereferences to its weight. Clones share it.
#[derive(Clone)]
pub(super) struct Linear<B: Backend> {
    weight: B::Weight,
    residency: Residency,
    /// Full names and rows of the stacked layers.
    layers: Vec<(String, usize)>,
    cols: usize,
    /// Whether a LoRA is merged into the weight.
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

    /// Loads several layers with the same input as one.
    pub(super) fn load_stack(
        b: &B,
        vars: &Vars<'_>,
        plan: &ResidencyPlan,
        leaves: &[(&str, usize)],
        cols: usize,
    ) -> Result<Self> {
        let layer = vars.linear_stack(leaves, cols)?;
        let residency = plan.next(layer.bytes());
        Ok(Linear {
            weight: b.load_weight(layer, residency)?,
            residency,
            layers: leaves.iter().map(|&(leaf, rows)| (vars.name(leaf), rows)).collect(),
            cols,
            merged: vars.is_merged(leaves, cols),
        })
    }

    /// Returns the layer with the LoRAs of `root` instead. Reloads the weight only if a LoRA is, or was, merged into it.
    pub(super) fn with_loras(&self, b: &B, root: &Vars<'_>) -> Result<Self> {
        let leaves: Vec<(&str, usize)> =
            self.layers.iter().map(|(name, rows)| (name.as_str(), *rows)).collect();
        let merged = root.is_merged(&leaves, self.cols);
        let weight = if merged || self.merged {
            b.load_weight(root.linear_stack(&leaves, self.cols)?, self.residency)?
        } else {
            b.with_deltas(&self.weight, root.deltas(&leaves, self.cols)?)?
        };
        Ok(Linear { weight, residency: self.residency, layers: self.layers.clone(), cols: self.cols, merged })
    }

    /// Full names and rows of the stacked layers.
    pub(super) fn stack(&self) -> &[(String, usize)] {
        &self.layers
    }

    /// The stacked layers.
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

//! Modulation: shift, scale and gate of every block, computed from the timestep embedding.
//!
//! One projection `[dim] → [6 · dim]` per stream serves all double blocks, another `[dim] → [3 · dim]` all single blocks.
//! The order is (shift, scale, gate). Rows of extracted references are modulated for t = 0, all others for the step's t.

use kiln_ops::{Backend, RowGroups};
use kiln_weights::Vars;

use super::linear::Linear;
use super::row_levels::RowLevels;
use crate::{ResidencyPlan, Result};

/// The timestep embedding after SiLU, `[1, dim]`: of this step and of t = 0.
pub(super) struct ModulationInputs<'a, B: Backend> {
    pub(super) current: &'a B::Tensor,
    pub(super) clean: &'a B::Tensor,
}

/// Shift, scale and gate of a sub-block, `[groups, dim]` each: one row per group of rows with the same noise level.
pub(super) struct Modulation<B: Backend> {
    pub(super) shift: B::Tensor,
    pub(super) scale: B::Tensor,
    pub(super) gate: B::Tensor,
}

/// The modulations of a double block's attention and MLP.
pub(super) struct DoubleModulation<B: Backend> {
    pub(super) attn: Modulation<B>,
    pub(super) mlp: Modulation<B>,
    pub(super) groups: RowGroups,
}

/// The modulation of a single block.
pub(super) struct SingleModulation<B: Backend> {
    pub(super) block: Modulation<B>,
    pub(super) groups: RowGroups,
}

impl<B: Backend> DoubleModulation<B> {
    fn new(parts: [B::Tensor; 6], groups: RowGroups) -> Self {
        let [shift, scale, gate, mlp_shift, mlp_scale, mlp_gate] = parts;
        DoubleModulation {
            attn: Modulation { shift, scale, gate },
            mlp: Modulation { shift: mlp_shift, scale: mlp_scale, gate: mlp_gate },
            groups,
        }
    }
}

impl<B: Backend> SingleModulation<B> {
    fn new([shift, scale, gate]: [B::Tensor; 3], groups: RowGroups) -> Self {
        SingleModulation { block: Modulation { shift, scale, gate }, groups }
    }
}

/// The layer that computes the modulations of `sets` sub-blocks.
#[derive(Clone)]
pub(super) struct ModulationProjection<B: Backend> {
    linear: Linear<B>,
    dim: usize,
}

impl<B: Backend> ModulationProjection<B> {
    pub(super) fn load(
        b: &B,
        vars: &Vars<'_>,
        plan: &ResidencyPlan,
        sets: usize,
        dim: usize,
    ) -> Result<Self> {
        Ok(ModulationProjection { linear: Linear::load(b, vars, plan, "linear", 3 * sets * dim, dim)?, dim })
    }

    pub(super) fn linear(&mut self) -> &mut Linear<B> {
        &mut self.linear
    }

    /// Computes the modulations of a double block.
    pub(super) fn double(
        &self,
        b: &B,
        inputs: &ModulationInputs<'_, B>,
        row_levels: &RowLevels,
    ) -> Result<DoubleModulation<B>> {
        Ok(DoubleModulation::new(self.forward(b, inputs, row_levels)?, row_levels.groups()))
    }

    /// Computes the modulation of a single block.
    pub(super) fn single(
        &self,
        b: &B,
        inputs: &ModulationInputs<'_, B>,
        row_levels: &RowLevels,
    ) -> Result<SingleModulation<B>> {
        Ok(SingleModulation::new(self.forward(b, inputs, row_levels)?, row_levels.groups()))
    }

    /// Computes the modulations of a double block, one row of `silu` per group of rows.
    pub(super) fn double_of(
        &self,
        b: &B,
        silu: &B::Tensor,
        groups: RowGroups,
    ) -> Result<DoubleModulation<B>> {
        Ok(DoubleModulation::new(b.linear_split(silu, &self.linear, [self.dim; 6])?, groups))
    }

    /// Computes the modulation of a single block, one row of `silu` per group of rows.
    pub(super) fn single_of(
        &self,
        b: &B,
        silu: &B::Tensor,
        groups: RowGroups,
    ) -> Result<SingleModulation<B>> {
        Ok(SingleModulation::new(b.linear_split(silu, &self.linear, [self.dim; 3])?, groups))
    }

    /// Returns `N` tensors with one row per run of equal noise levels. The matrix product itself has one row per level.
    fn forward<const N: usize>(
        &self,
        b: &B,
        inputs: &ModulationInputs<'_, B>,
        row_levels: &RowLevels,
    ) -> Result<[B::Tensor; N]> {
        let ModulationInputs { current, clean } = *inputs;
        let x = if row_levels.has_clean() { b.concat_rows(&[current, clean])? } else { current.clone() };
        let mut tensors = b.linear_split(&x, &self.linear, [self.dim; N])?;
        if row_levels.has_clean() {
            for tensor in &mut tensors {
                let rows = [b.slice_rows(tensor, 0..1)?, b.slice_rows(tensor, 1..2)?];
                let rows: Vec<_> = row_levels.levels().map(|level| &rows[level as usize]).collect();
                *tensor = b.concat_rows(&rows)?;
            }
        }
        Ok(tensors)
    }
}

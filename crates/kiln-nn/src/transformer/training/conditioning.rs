//! What the blocks of a training batch have in common: modulations, rotary embeddings, the rows of each example.

use kiln_ops::{AttentionSpec, RowGroups, TrainingBackend};

use super::attention::ExampleRows;
use crate::transformer::modulation::{DoubleModulation, SingleModulation};
use crate::transformer::rope::RopeTables;

/// What conditions the blocks of one batch.
pub(super) struct Conditioning<B: TrainingBackend> {
    /// Of the image and text streams; `None` without double blocks.
    pub(super) double: Option<[DoubleModulation<B>; 2]>,
    pub(super) single: SingleModulation<B>,
    /// Scale and shift of the last norm, one row per example, and its rows.
    pub(super) norm_out: [B::Tensor; 2],
    pub(super) image_groups: RowGroups,
    pub(super) rope: RopeTables<B>,
    pub(super) rows: Vec<ExampleRows>,
    pub(super) spec: AttentionSpec,
}

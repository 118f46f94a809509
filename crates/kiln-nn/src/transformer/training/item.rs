//! One example of a training batch, as tensors of the backend.

use kiln_ops::TrainingBackend;

use crate::transformer::rope::RopeTables;

/// One example of a training batch.
pub struct TrainingItem<'a, B: TrainingBackend> {
    /// Text tokens, `[t, joint_dim]`.
    pub text: &'a B::Tensor,
    /// Noisy latents, f32, `[n, channels]`.
    pub image: &'a B::Tensor,
    /// Tokens of all reference images, f32, `[r, channels]`.
    pub references: Option<&'a B::Tensor>,
    /// From [`Transformer::rope_tables`](crate::transformer::Transformer::rope_tables), references behind the image.
    pub rope: &'a RopeTables<B>,
    /// The noise level, `t / 1000`.
    pub timestep: f32,
}
